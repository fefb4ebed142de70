"""The torch sampler against distributions computed by hand and penalties computed one by one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.random_stream import HASH_FACTORS, row_keys
from kernels.sampling import Adjustment, SamplingRows
from kernels.torch.sampling import adjust, chosen_logprobs, natural_log, sample, unpack_mask

LOGITS = torch.tensor([1.5, -0.5, 0.3, 2.0, -3.0, 1.5, 0.0, 0.9, -1.0, 2.0])


def hashes(keys_S: NDArray[np.uint64], first_id: int, num_tokens: int) -> NDArray[np.uint32]:
    """(S, num_tokens) numbers of 32 bits, of the tokens from first_id on, in plain integers."""
    low_S1 = (keys_S & np.uint64(0xFFFFFFFF)).astype(np.uint32)[:, None]
    high_S1 = (keys_S >> np.uint64(32)).astype(np.uint32)[:, None]
    a, b, c = (np.uint32(factor) for factor in HASH_FACTORS)
    with np.errstate(over="ignore"):
        x = np.arange(first_id, first_id + num_tokens, dtype=np.uint32) + low_S1
        x = ((x ^ (x >> np.uint32(17))) * a) ^ high_S1
        x = (x ^ (x >> np.uint32(11))) * b
        x = (x ^ (x >> np.uint32(15))) * c
        return x ^ (x >> np.uint32(14))


def rows(count: int, first_seed: int = 0, **options: float) -> SamplingRows:
    def full(name: str, default: float, dtype: type) -> Any:
        return np.full(count, options.get(name, default), dtype=dtype)

    return SamplingRows(
        temperature_S=full("temperature", 1.0, np.float32),
        top_k_S=full("top_k", 0, np.int32),
        top_p_S=full("top_p", 1.0, np.float32),
        min_p_S=full("min_p", 0.0, np.float32),
        seed_S=np.arange(first_seed, first_seed + count, dtype=np.int64),
        position_S=full("position", 17, np.int64),
    )


def kept_by_hand(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The distribution of the definition, token by token in Python."""
    scaled = [float(x) / temperature for x in LOGITS]
    highest = max(scaled)
    weights = [math.exp(x - highest) for x in scaled]
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    if top_k:
        order = order[:top_k]
    total, kept, reached = sum(weights[i] for i in order), [], 0.0
    for i in order:
        if top_p < 1 and reached >= top_p * total:
            break
        kept.append(i)
        reached += weights[i]
    kept = [i for i in kept if weights[i] >= min_p]
    probabilities = np.zeros(len(weights))
    probabilities[kept] = [weights[i] for i in kept]
    return probabilities / probabilities.sum()


CUTS: list[dict[str, float]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 3},
    {"top_k": 1},
    {"top_p": 0.7},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"temperature": 1.7, "top_k": 7, "top_p": 0.9, "min_p": 0.1},
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_distribution(cut: dict[str, Any]) -> None:
    """Chi-square of 40 000 draws with fixed seeds; what is cut is never drawn."""
    count = 40_000
    drawn = sample(LOGITS.expand(count, -1), rows(count, **cut))
    observed = np.bincount(drawn, minlength=len(LOGITS))
    expected = kept_by_hand(**cut) * count
    assert (observed[expected == 0] == 0).all()
    alive = expected > 0
    chi_square = ((observed[alive] - expected[alive]) ** 2 / expected[alive]).sum()
    # 99.9 % of chi-square with 9 degrees of freedom lie below 27.9; fewer degrees, lower still.
    assert chi_square < 27.9


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_draw_is_the_winner_of_the_race(cut: dict[str, Any]) -> None:
    """Token by token what the definition says: the highest logit / temperature + Gumbel noise."""
    count = 2_000
    drawn = sample(LOGITS.expand(count, -1), rows(count, 500, **cut))
    kept = kept_by_hand(**cut) > 0
    keys = row_keys(np.arange(500, 500 + count), np.full(count, 17))
    for s, noise_V in enumerate(hashes(keys, 0, len(LOGITS)).tolist()):
        scores = [
            x / cut.get("temperature", 1.0) - math.log(-math.log(1 - (h + 0.5) / 2**32))
            for x, h in zip(LOGITS.tolist(), noise_V, strict=True)
        ]
        alive = [score if kept[i] else -math.inf for i, score in enumerate(scores)]
        assert drawn[s] == max(range(len(alive)), key=lambda i: alive[i])


def test_the_natural_log() -> None:
    x = torch.cat(
        (
            torch.logspace(-11, 2, 9999, dtype=torch.float64),
            1 - 2.0 ** -torch.arange(1, 34).double(),
        )
    )
    torch.testing.assert_close(natural_log(x), torch.log(x), rtol=1e-12, atol=0)


def test_draws_depend_on_seed_and_position_alone() -> None:
    """Neither the row nor the neighbors matter."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(64, 1000, generator=generator)
    together = rows(64, 9, top_p=0.9, temperature=1.3)
    all_at_once = sample(logits, together)
    for s in (0, 13, 63):
        alone = rows(1, 9 + s, top_p=0.9, temperature=1.3)
        assert sample(logits[s : s + 1], alone)[0] == all_at_once[s]
    later = sample(logits, rows(64, 9, top_p=0.9, temperature=1.3, position=18))
    assert (later != all_at_once).sum() > 32


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert sample(LOGITS[None], rows(1, temperature=0.0)).tolist() == [3]


def test_greedy_and_warm_rows_share_a_batch() -> None:
    mixed = rows(4, top_k=1)
    mixed.temperature_S[:] = [0.0, 1.0, 0.0, 0.5]
    mixed.top_k_S[:] = [0, 1, 5, 1]
    assert sample(LOGITS.expand(4, -1), mixed).tolist() == [3, 3, 3, 3]


def test_tiny_temperature_does_not_overflow() -> None:
    drawn = sample(LOGITS.expand(200, -1) * 100, rows(200, temperature=1e-5))
    assert set(drawn.tolist()) == {3, 9}  # the two equal highest


def test_masked_logits_are_never_drawn() -> None:
    logits = LOGITS.clone()
    logits[[3, 9, 0]] = float("-inf")
    drawn = sample(logits.expand(5000, -1), rows(5000, temperature=2.0))
    assert not {0, 3, 9} & set(drawn.tolist())
    assert {1, 2, 5, 6, 7, 8} <= set(drawn.tolist())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("cut", [{}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 0.0}], ids=str)
def test_a_row_with_one_that_is_not_finite_draws_nothing(cut: dict[str, Any], value: float) -> None:
    logits = LOGITS.repeat(len(LOGITS), 1)
    logits.fill_diagonal_(value)
    assert set(sample(logits, rows(len(logits), **cut)).tolist()) == {-1}


def adjusted(**options: Any) -> list[float]:
    logits = LOGITS.clone()[None].repeat(2, 1)
    prompt, output = np.array([0, 1, 1], np.int32), np.array([3, 3, 8], np.int32)
    adjust(logits, [Adjustment(1, prompt, output, **options)])
    assert torch.equal(logits[0], LOGITS)
    return logits[1].tolist()


def by_hand(changes: dict[int, float]) -> list[float]:
    values = LOGITS.tolist()
    for token, value in changes.items():
        values[token] = value
    return values


def test_repetition_penalty_sees_prompt_and_output_once() -> None:
    want = by_hand({0: 1.5 / 2, 1: -0.5 * 2, 3: 2.0 / 2, 8: -1.0 * 2})
    assert adjusted(repetition_penalty=2.0) == pytest.approx(want)


def test_presence_penalty_sees_the_output_alone() -> None:
    assert adjusted(presence_penalty=0.5) == pytest.approx(by_hand({3: 1.5, 8: -1.5}))


def test_frequency_penalty_counts() -> None:
    assert adjusted(frequency_penalty=0.5) == pytest.approx(by_hand({3: 1.0, 8: -1.5}))


def test_bias_comes_before_the_penalty() -> None:
    want = by_hand({0: 1.5 / 2, 1: (-0.5 + 1.5) / 2, 3: 1.0, 8: -2.0, 5: -98.5})
    assert adjusted(bias=((1, 1.5), (5, -100.0)), repetition_penalty=2.0) == pytest.approx(want)


def test_masks() -> None:
    allowed = torch.tensor([0b1000001010], dtype=torch.int32)  # tokens 1, 3 and 9
    assert unpack_mask(allowed, 10).nonzero().flatten().tolist() == [1, 3, 9]
    infinite = float("-inf")
    want = [infinite, -0.5, infinite, infinite] + [infinite] * 5 + [2.0]
    assert adjusted(allowed_W=allowed, forbidden=(3,)) == want
    # A grammar with nothing but the forbidden end left: the end it is.
    only_end = torch.tensor([0b1000], dtype=torch.int32)
    assert adjusted(allowed_W=only_end, forbidden=(3,))[3] == 2.0


def test_highest_bit_of_a_mask() -> None:
    words = torch.tensor([-(2**31), 1], dtype=torch.int32)
    assert unpack_mask(words, 40).nonzero().flatten().tolist() == [31, 32]


def test_chosen_logprobs() -> None:
    logits = LOGITS[None].repeat(2, 1)
    chosen, rank, top, ids = chosen_logprobs(logits, torch.tensor([9, 4]), 3)
    total = math.log(sum(math.exp(x) for x in LOGITS.tolist()))
    assert chosen.tolist() == pytest.approx([2.0 - total, -3.0 - total])
    assert rank.tolist() == [1, 10]
    assert set(ids[0, :2].tolist()) == {3, 9}
    assert top[0].tolist() == pytest.approx([2.0 - total, 2.0 - total, 1.5 - total])


def test_noise_is_uniform_along_tokens_positions_and_seeds() -> None:
    many, one = np.arange(20_000), np.zeros(20_000, np.int64)
    along = {
        "tokens": hashes(row_keys(one[:1] + 3, one[:1] + 9), 0, 20_000)[0],
        "positions": hashes(row_keys(one + 1, many), 77, 1)[:, 0],
        "seeds": hashes(row_keys(many, one + 5), 49_151, 1)[:, 0],
        "positions of the last seed": hashes(row_keys(np.full(20_000, 2**63 - 1), many), 0, 1)[
            :, 0
        ],
        "tokens and positions": hashes(row_keys(one[:141], many[:141]), 0, 141).diagonal(),
    }
    for name, drawn in along.items():
        u = drawn / 2.0**32
        expected = len(u) / 20
        counts, _ = np.histogram(u, bins=20, range=(0, 1))
        assert ((counts - expected) ** 2 / expected).sum() < 43.8, name  # 99.9 % with 19 degrees
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 3.5 / math.sqrt(len(u)), name


def test_rows_of_noise_do_not_resemble_each_other() -> None:
    """Neither at the same tokens nor a few tokens apart."""
    noise = hashes(row_keys(np.arange(20) // 5, np.arange(20) % 5), 0, 4000) / 2.0**32
    for shift in range(4):
        late = noise[:, shift:]
        related = np.corrcoef(noise[:, : late.shape[1]], late)[:20, 20:]
        if shift == 0:
            np.fill_diagonal(related, 0)
        assert abs(related).max() < 5 / math.sqrt(4000)


def by_inverse(probability_SV: torch.Tensor, u_S1: torch.Tensor) -> torch.Tensor:
    """The other way to draw: the first id whose cumulative probability exceeds a number."""
    return (probability_SV.double().cumsum(-1) <= u_S1).sum(-1)


# How far a draft model's logits are from the model's, in the standard deviation of each.
@pytest.mark.parametrize("distance", [0.1, 0.3, 1.0])
def test_near_distributions_draw_the_same_token(distance: float) -> None:
    """At least with probability (1 - TV) / (1 + TV); the inverse in the order of ids does worse."""
    count, vocabulary = 3000, 400
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(count, vocabulary, generator=generator)
    near = logits + distance * torch.randn(count, vocabulary, generator=generator)
    same = (sample(logits, rows(count)) == sample(near, rows(count))).mean()
    p, q = torch.softmax(logits, -1), torch.softmax(near, -1)
    variation_S = (p - q).abs().sum(-1) / 2
    bound = ((1 - variation_S) / (1 + variation_S)).mean().item()
    u_S1 = torch.rand(count, 1, generator=generator, dtype=torch.float64)
    same_inverse = (by_inverse(p, u_S1) == by_inverse(q, u_S1)).float().mean().item()
    assert same > bound - 3 * math.sqrt(bound * (1 - bound) / count)
    assert same > same_inverse + 0.02


def test_a_mask_of_the_host_serves_logits_of_another_device() -> None:
    """On tensors without numbers, whose operations refuse devices that differ as real ones do."""
    with FakeTensorMode():
        logits_SV = torch.zeros(1, 10, device="meta")
        nothing = np.zeros(0, np.int32)
        mask_W = torch.zeros(1, dtype=torch.int32)
        adjust(logits_SV, [Adjustment(0, nothing, nothing, allowed_W=mask_W)])
    assert logits_SV.device.type == "meta"
