"""The GPU sampler draws the tokens of `kernels.torch.sampling`, ties, masks and all."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be tested")
# Set by tests/conftest.py where there is no GPU.
ON_GPU = os.environ.get("TRITON_INTERPRET") != "1"

from app.bench.gpu.checks import poisoned_outputs  # noqa: E402
from kernels.sampling import Adjustment, SamplingRows  # noqa: E402
from kernels.torch import sampling as reference  # noqa: E402
from kernels.triton import depths, threshold  # noqa: E402
from kernels.triton import logits as triton_logits  # noqa: E402
from kernels.triton import sampling as triton_sampling  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")


def rows_of(rng: np.random.Generator, count: int, vocabulary: int) -> SamplingRows:
    def pick(choices: list[float], dtype: type) -> np.ndarray:
        return rng.choice(choices, count).astype(dtype)

    return SamplingRows(
        temperature_S=pick([0, 1e-38, 0.5, 1, 1.7], np.float32),
        top_k_S=pick([0, 1, 3, 40, vocabulary, 2 * vocabulary], np.int32),
        top_p_S=pick([1, 0.999, 0.9, 0.3, 0.01, 0], np.float32),
        min_p_S=pick([0, 0, 0.1, 0.5], np.float32),
        seed_S=rng.integers(0, 2**63 - 1, count),
        position_S=rng.integers(0, 100_000, count),
    )


@pytest.mark.parametrize(
    ("vocabulary", "ties"), [(3, False), (50, True), (2048, False), (5000, True)]
)
def test_the_same_tokens_as_the_torch_sampler(vocabulary: int, ties: bool) -> None:
    rng = np.random.default_rng(vocabulary)
    logits = torch.from_numpy(rng.normal(0, 3, (40, vocabulary)).astype(np.float32))
    if ties:
        logits = logits.round()
    logits[5, 1:] = -torch.inf
    logits[6, : vocabulary // 2] = -torch.inf
    rows = rows_of(rng, 40, vocabulary)
    rows.temperature_S[5:7] = 1
    logits[7] = -torch.inf
    before = logits.clone()
    with poisoned_outputs():
        drawn = triton_sampling.sample(logits.to(DEVICE), rows)
    assert drawn.tolist() == reference.sample(logits, rows).tolist()
    assert torch.equal(logits, before)
    assert drawn[5] == 0
    assert drawn[7] == -1


@pytest.mark.parametrize("cut", [(0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.5)])
def test_a_row_with_one_that_is_not_finite_draws_nothing(cut: tuple[float, int, float]) -> None:
    places, vocabulary = (0, 2047, 2999), 3000
    logits = torch.arange(float(vocabulary)).cos().mul(3).repeat(2 * len(places) + 1, 1)
    for row, at in enumerate(places):
        logits[row, at], logits[row + len(places), at] = torch.nan, torch.inf
    rows = rows_of(np.random.default_rng(2), len(logits), vocabulary)
    rows.temperature_S[:], rows.top_k_S[:], rows.top_p_S[:] = cut
    drawn = triton_sampling.sample(logits.to(DEVICE), rows)
    assert drawn[:-1].tolist() == [-1] * (len(logits) - 1)
    assert drawn.tolist() == reference.sample(logits, rows).tolist()
    rows.top_k_S[:], rows.top_p_S[:], rows.min_p_S[:] = 0, 1, 0
    scores_S, _ = triton_sampling.gumbel_argmax(logits.to(DEVICE), rows)
    assert np.isfinite(scores_S).tolist() == [False] * (len(logits) - 1) + [True]


def test_parts_of_a_vocabulary_race_with_the_scores_of_the_torch_sampler() -> None:
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.normal(0, 3, (20, 3000)).astype(np.float32))
    rows = rows_of(rng, 20, 3000)
    rows.top_k_S[:], rows.top_p_S[:], rows.min_p_S[:] = 0, 1, 0
    for first_id in (0, 3000):
        score_S, token_S = triton_sampling.gumbel_argmax(logits.to(DEVICE), rows, first_id)
        expected = reference.gumbel_argmax(logits, rows, first_id)
        assert score_S.tolist() == expected[0].tolist()
        assert token_S.tolist() == expected[1].tolist()


def test_adjustments_are_those_of_the_torch_sampler() -> None:
    rng = np.random.default_rng(1)
    vocabulary = 100
    words = torch.from_numpy(rng.integers(-(2**31), 2**31, 4).astype(np.int32))
    only_seven = torch.tensor([1 << 7, 0, 0, 0], dtype=torch.int32)
    tokens = rng.integers(0, vocabulary, 30).astype(np.int32)
    nothing = tokens[:0]
    adjustments = [
        Adjustment(0, tokens[:20], tokens[20:], ((3, 2.5), (int(tokens[0]), -1.0)), 1.3),
        Adjustment(2, tokens, np.repeat(tokens, 2), (), 1.0, 0.5, 0.25, (9, 11)),
        Adjustment(3, tokens[:5], tokens[5:], ((1, 4.0),), 0.8, 0.1, 0.2, (5,), words),
        Adjustment(4, nothing, nothing, forbidden=(7,), allowed_W=only_seven),
        Adjustment(5, nothing, nothing, ((7, 1.0), (7, 1.0))),
    ]
    logits = torch.from_numpy(rng.normal(0, 3, (6, vocabulary)).astype(np.float32))
    expected, adjusted = logits.clone(), logits.to(DEVICE)
    reference.adjust(expected, adjustments)
    triton_logits.adjust(adjusted, adjustments)
    torch.testing.assert_close(adjusted.cpu(), expected)
    assert torch.equal(adjusted[1].cpu(), logits[1])
    assert torch.isfinite(adjusted[4]).nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize("vocabulary", [20, 64, 100])
@pytest.mark.parametrize("behind", [0, -1])
def test_a_stop_token_that_alone_is_allowed_outranks_min_tokens(
    vocabulary: int, behind: int
) -> None:
    """Whatever a mask has behind the last token."""
    words = np.zeros(-(-vocabulary // 32), np.int32)
    words[-1] = behind << vocabulary % 32 if vocabulary % 32 else 0
    words[0] |= 1 << 7
    nothing, allowed_W = words[:0], torch.from_numpy(words)
    adjustments = [Adjustment(0, nothing, nothing, forbidden=(7,), allowed_W=allowed_W)]
    logits = torch.arange(float(vocabulary))[None].cos()
    expected, adjusted = logits.clone(), logits.to(DEVICE)
    reference.adjust(expected, adjustments)
    triton_logits.adjust(adjusted, adjustments)
    assert torch.equal(adjusted.cpu(), expected)
    assert torch.isfinite(adjusted[0]).nonzero().flatten().tolist() == [7]


def test_a_program_reads_a_piece_of_a_row_whatever_the_row_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One program a row would leave a GPU idle below some hundred rows, and take milliseconds for
    a large vocabulary. Two launches have one: for what is left of a row."""
    grids: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Kernel:
            grids.append(grid)
            return self

        def __call__(self, *arguments: object, **constants: object) -> None: ...

    for module in (triton_sampling, depths, threshold):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Kernel())
    triton_sampling.sample_rows(torch.zeros(3, 128_256), torch.zeros(3, 3, dtype=torch.float64))
    assert grids == [(63, 3), (3,), (63, 3), (3,)]
