"""The C++ sampler draws the tokens of `kernels.torch.sampling`: ties, masks, penalties and all."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from kernels.cpu import library
from kernels.sampling import Adjustment, SamplingRows
from kernels.torch import sampling as reference

if library.load() is None:
    pytest.skip("the CPU library is not built here", allow_module_level=True)

from kernels.cpu import sampling as fast
from kernels.random_stream import row_keys
from tests.kernels.cpu.batches import EACH_SET, instruction_set, threads

pytestmark = EACH_SET


@pytest.fixture(autouse=True)
def _isa(isa: library.Isa):  # type: ignore[no-untyped-def]
    with instruction_set(isa):
        yield


def rows_of(rng: np.random.Generator, count: int, vocabulary: int) -> SamplingRows:
    def pick(choices: list[float], dtype: type) -> np.ndarray:
        return rng.choice(choices, count).astype(dtype)

    return SamplingRows(
        temperature_S=pick([0, 1e-38, 0.3, 0.8, 1, 1.7], np.float32),
        top_k_S=pick([0, 0, 1, 3, 40, 5000, vocabulary, 2 * vocabulary], np.int32),
        top_p_S=pick([1, 1, 0.999, 0.95, 0.5, 0.01, 0], np.float32),
        min_p_S=pick([0, 0, 0, 0.02, 0.5, 1], np.float32),
        seed_S=rng.integers(0, 2**63 - 1, count),
        position_S=rng.integers(0, 100_000, count),
    )


def uniform_rows(count: int, **columns: float) -> SamplingRows:
    """Rows that draw alike, but for the position."""
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7, **columns}
    return SamplingRows(
        temperature_S=np.full(count, settings["temperature"], np.float32),
        top_k_S=np.full(count, settings["top_k"], np.int32),
        top_p_S=np.full(count, settings["top_p"], np.float32),
        min_p_S=np.full(count, settings["min_p"], np.float32),
        seed_S=np.full(count, settings["seed"], np.int64),
        position_S=np.arange(count, dtype=np.int64),
    )


@functools.lru_cache(maxsize=1)
def drawn_by_torch(vocabulary: int, kind: str) -> tuple[torch.Tensor, SamplingRows, list[int]]:
    rng = np.random.default_rng(vocabulary)
    count = 60 if vocabulary < 10_000 else 24
    scale = {"normal": 3.0, "flat": 0.05, "peaked": 12.0, "ties": 2.0, "constant": 0.0}[kind]
    values = rng.normal(0, 1, (count, vocabulary)) * scale + 5
    logits = torch.from_numpy(values.astype(np.float32))
    if kind == "ties":
        logits = logits.round()
    if vocabulary > 2:
        logits[5, 1:] = -torch.inf
        logits[6, : vocabulary // 2] = -torch.inf
    rows = rows_of(rng, count, vocabulary)
    return logits, rows, reference.sample(logits, rows).tolist()


@pytest.mark.parametrize("kind", ["normal", "flat", "peaked", "ties", "constant"])
@pytest.mark.parametrize("vocabulary", [1, 3, 31, 50, 1024, 5000, 49_152])
def test_the_same_tokens_as_the_torch_sampler(vocabulary: int, kind: str) -> None:
    logits, rows, expected = drawn_by_torch(vocabulary, kind)
    given = logits.clone()
    assert fast.sample(given, rows).tolist() == expected
    assert torch.equal(logits, given)


@pytest.mark.parametrize("height", [0.0, 1e9, 1e17, 1e20])
def test_scores_that_tie_take_the_lowest_id(height: float) -> None:
    """Beside logits so high, float64 has no room for the noise, or for a part of it."""
    logits = torch.full((20, 5000), height)
    rows = uniform_rows(20, temperature=100.0)
    drawn = fast.sample(logits, rows).tolist()
    assert drawn == reference.sample(logits, rows).tolist()
    assert height < 1e20 or drawn == [0] * 20


@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_draws_nothing(temperature: float, cut: dict[str, float]) -> None:
    """Also where one logit is NaN or infinite, wherever it stands."""
    vocabulary = 401
    places = [0, 5, 63, 64, 200, 399, 400]
    logits = torch.arange(float(2 * len(places) + 4)).sin()[:, None].repeat(1, vocabulary)
    logits += torch.arange(float(vocabulary)).cos() * 3
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        logits[row] = value
    for row, at in enumerate(places, 3):
        logits[row, at], logits[row + len(places), at] = torch.nan, torch.inf
    rows = uniform_rows(len(logits), temperature=temperature, **cut)
    for sample in (fast.sample, reference.sample):
        drawn = sample(logits, rows).tolist()
        assert drawn[:-1] == [-1] * (len(logits) - 1)
        assert 0 <= drawn[-1] < vocabulary
    for gumbel_argmax in (fast.gumbel_argmax, reference.gumbel_argmax):
        scores_S, _ = gumbel_argmax(logits, rows)
        assert np.isfinite(scores_S).tolist() == [False] * (len(logits) - 1) + [True]


@pytest.mark.parametrize("top_k", [1, 2, 7, 40])
def test_top_k_keeps_exactly_k(top_k: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_V = torch.randn(2000, generator=generator).mul(0.01)
    logits = logits_V.repeat(1500, 1)
    drawn = fast.sample(logits, uniform_rows(1500, top_k=top_k))
    assert set(drawn.tolist()) == set(logits_V.topk(top_k).indices.tolist())


def test_top_p_keeps_the_shortest_prefix_that_reaches_p() -> None:
    probability = torch.tensor([0.05, 0.5, 0.15, 0.3])
    logits = probability.log().repeat(2000, 1)
    for top_p, kept in (
        (0.1, {1}),
        (0.49, {1}),
        (0.51, {1, 3}),
        (0.81, {1, 2, 3}),
        (1.0, {0, 1, 2, 3}),
    ):
        drawn = fast.sample(logits, uniform_rows(2000, top_p=top_p))
        assert set(drawn.tolist()) == kept, top_p


def test_a_draw_follows_the_distribution() -> None:
    probability = torch.tensor([0.5, 0.3, 0.15, 0.05])
    count = 20_000
    logits = (probability.log() / 2).repeat(count, 1)
    drawn = fast.sample(logits, uniform_rows(count, temperature=0.5))
    shares = np.bincount(drawn, minlength=4) / count
    np.testing.assert_allclose(shares, probability.numpy(), atol=0.012)


def test_rows_without_a_choice() -> None:
    logits = torch.zeros(5, 100)
    logits[0] = -torch.inf
    logits[1, 60] = torch.inf
    logits[2, 7] = torch.nan
    logits[3, :] = -torch.inf
    logits[3, 99] = -3.0
    logits[4, 50:] = 1.0
    for temperature in (0.0, 1e-30, 1.0):
        drawn = fast.sample(logits, uniform_rows(5, temperature=temperature))
        assert drawn[0] == -1
        assert drawn[1] == -1
        assert drawn[2] == -1
        assert drawn[3] == 99
        assert drawn[4] == 50 or temperature > 0
        assert temperature != 1e-30 or drawn[4] >= 50


def test_a_row_does_not_depend_on_the_others() -> None:
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.normal(0, 2, (20, 3000)).astype(np.float32))
    rows = rows_of(rng, 20, 3000)
    with threads(3):
        together = fast.sample(logits, rows)
    names = ("temperature_S", "top_k_S", "top_p_S", "min_p_S", "seed_S", "position_S")
    with threads(1):
        alone = [
            fast.sample(
                logits[s : s + 1],
                SamplingRows(**{n: getattr(rows, n)[s : s + 1] for n in names}),
            )[0]
            for s in range(20)
        ]
    assert together.tolist() == alone


NOISE_AT = [
    (seed, position)
    for seed in (0, 1, 12345, -1, 2**63 - 1)
    for position in (0, 1, 77, 131_072, 2**40)
]
NOISE_OF = (0, 1, 77, 49_151, 262_143)


@functools.cache
def noise_of_torch() -> list[list[float]]:
    """At each place, of these tokens, among all up to the last."""
    found = []
    for seed, position in NOISE_AT:
        key = int(row_keys(np.array([seed]), np.array([position]))[0])
        halves = torch.tensor([[key & 0xFFFFFFFF, key >> 32]])
        whole_V = reference.gumbel_noise(halves, 0, NOISE_OF[-1] + 1)[0]
        found.append(whole_V[[*NOISE_OF]].tolist())
    return found


def test_the_noise_has_the_same_bits() -> None:
    import ctypes

    number = ctypes.c_int64
    noise = library.function("legato_gumbel_noise", ctypes.c_double, number, number, number)
    found = [[noise(seed, position, t) for t in NOISE_OF] for seed, position in NOISE_AT]
    assert found == noise_of_torch()


@pytest.mark.parametrize("vocabulary", [5, 49_152])
def test_parts_of_a_vocabulary_race_apart(vocabulary: int) -> None:
    """Scores and winners have the bits of the torch form, and the best of the parts is the token
    of the whole."""
    rng = np.random.default_rng(vocabulary)
    logits = torch.from_numpy(rng.normal(0, 3, (40, vocabulary)).astype(np.float32))
    logits[30:] = logits[30:].round()
    rows = rows_of(rng, 40, vocabulary)
    rows.top_k_S[:], rows.top_p_S[:], rows.min_p_S[:] = 0, 1, 0
    drawn = fast.sample(logits, rows)
    middle = vocabulary // 2 - 1
    scores, tokens = [], []
    for part, first_id in ((logits[:, :middle], 0), (logits[:, middle:], middle)):
        score_S, token_S = fast.gumbel_argmax(part, rows, first_id)
        expected = reference.gumbel_argmax(part, rows, first_id)
        assert score_S.tolist() == expected[0].tolist()
        assert token_S.tolist() == expected[1].tolist()
        scores.append(score_S)
        tokens.append(token_S)
    won = np.argmax(scores, axis=0)  # the first part among equals
    assert np.choose(won, tokens).tolist() == drawn.tolist()


def adjustments_of(rng: np.random.Generator, count: int, vocabulary: int) -> list[Adjustment]:
    adjustments = []
    for row in rng.permutation(count)[: count - 2]:
        ids = rng.integers(0, vocabulary, 6)
        words = rng.integers(-(2**31), 2**31, -(-vocabulary // 32)).astype(np.int32)
        words[rng.random(words.size) < 0.3] = -1
        adjustments.append(
            Adjustment(
                row=int(row),
                prompt=rng.integers(0, vocabulary, 40).astype(np.int32),
                output=rng.integers(0, min(vocabulary, 30), int(rng.integers(0, 50))).astype(
                    np.int32
                ),
                bias=tuple(
                    (int(i), float(b)) for i, b in zip(ids, rng.normal(0, 5, 6), strict=True)
                )
                if rng.random() < 0.5
                else (),
                repetition_penalty=float(rng.choice([1.0, 1.3, 0.8])),
                presence_penalty=float(rng.choice([0.0, 0.7, -1.1])),
                frequency_penalty=float(rng.choice([0.0, 0.3])),
                forbidden=(1, 2, 2) if rng.random() < 0.5 else (),
                allowed_W=torch.from_numpy(words) if rng.random() < 0.5 else None,
            )
        )
    return adjustments


@pytest.mark.parametrize("vocabulary", [33, 1000, 4096])
def test_adjusting_gives_the_bits_of_the_torch_form(vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    logits = torch.from_numpy(rng.normal(0, 3, (40, vocabulary)).astype(np.float32))
    expected = logits.clone()
    adjustments = adjustments_of(rng, 40, vocabulary)
    fast.adjust(logits, adjustments)
    reference.adjust(expected, adjustments)
    assert torch.equal(logits, expected)


def test_a_grammar_that_allows_only_the_end_outranks_min_tokens() -> None:
    logits = torch.zeros(2, 40)
    only_five = torch.tensor([1 << 5, 0], dtype=torch.int32)
    nothing = np.empty(0, np.int32)
    fast.adjust(
        logits,
        [
            Adjustment(0, nothing, nothing, forbidden=(5,), allowed_W=only_five),
            Adjustment(1, nothing, nothing, forbidden=(5,)),
        ],
    )
    assert logits[0, 5] == 0
    assert torch.isinf(logits[0]).sum() == 39
    assert torch.isinf(logits[1]).nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("vocabulary", [1, 5, 100, 49_152])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_logprobs(num_top: int, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, vocabulary, generator=generator) * 4
    tokens = torch.randint(vocabulary, (7,), generator=generator)
    logprob, rank, top, ids = fast.chosen_logprobs(logits, tokens, num_top)
    exact = torch.log_softmax(logits.double(), dim=-1)
    np.testing.assert_allclose(logprob, exact.gather(1, tokens[:, None])[:, 0], atol=3e-6)
    expected = reference.chosen_logprobs(logits, tokens, num_top)
    assert rank.tolist() == expected[1].tolist()
    np.testing.assert_allclose(top, exact.gather(1, torch.from_numpy(ids)), atol=3e-6)
    assert ids.tolist() == expected[3].tolist()


def test_equal_alternatives_come_lowest_id_first() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0]])
    _, rank, _, ids = fast.chosen_logprobs(logits, torch.tensor([4]), 4)
    assert ids.tolist() == [[1, 3, 2, 4]]
    assert rank.tolist() == [3]


def test_refusals() -> None:
    logits = torch.zeros(2, 8)
    rows = uniform_rows(2)
    with pytest.raises(ValueError, match="float32 matrix"):
        fast.sample(logits.double(), rows)
    with pytest.raises(ValueError, match="contiguous rows"):
        fast.sample(torch.zeros(8, 2).t(), rows)
    with pytest.raises(ValueError, match="for 3 rows"):
        fast.sample(torch.zeros(3, 8), rows)
    nothing = np.empty(0, np.int32)
    with pytest.raises(IndexError, match="row 2"):
        fast.adjust(logits, [Adjustment(2, nothing, nothing)])
    with pytest.raises(ValueError, match="two adjustments"):
        fast.adjust(logits, [Adjustment(1, nothing, nothing)] * 2)
    with pytest.raises(ValueError, match="int32 words"):
        fast.adjust(
            logits,
            [Adjustment(1, nothing, nothing, allowed_W=torch.zeros(1).long())],
        )
    with pytest.raises(IndexError, match="vocabulary of 8"):
        fast.chosen_logprobs(logits, torch.tensor([0, 8]), 1)
