"""Length distributions: what draws prompt and output tokens of requests, both in tokens.

The paper's two datasets are synthesized from their published statistics.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.simulate.workload.arguments import MOST_TOKENS, num_tokens, positive, within

Rng = np.random.Generator
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Lengths = Callable[[int, Rng], tuple[Ints, Ints]]


def fixed_lengths(prompt: float, output: float) -> Lengths:
    prompt, output = num_tokens("prompt", prompt), num_tokens("output", output)
    return lambda n, rng: (np.full(n, prompt, np.int64), np.full(n, output, np.int64))


def uniform_lengths(low: float, high: float, prompt_per_output: float) -> Lengths:
    """Total length uniform in [low, high], split prompt : output at the given ratio."""
    low, high = _bounds(low, high, prompt_per_output)

    def draw(n: int, rng: Rng) -> tuple[Ints, Ints]:
        return _split(rng.integers(low, high + 1, n), prompt_per_output)

    return draw


def zipf_lengths(
    low: float = 1024, high: float = 4096, theta: float = 0.6, prompt_per_output: float = 20.0
) -> Lengths:
    """Total length Zipf-distributed over [low, high] (short ones likelier), split at a ratio."""
    low, high = _bounds(low, high, prompt_per_output)
    within("theta", theta, 0.0, 100.0)
    ranks = np.arange(1, high - low + 2, dtype=np.float64)
    weights = ranks**-theta
    cumulative = np.cumsum(weights) / weights.sum()

    def draw(n: int, rng: Rng) -> tuple[Ints, Ints]:
        totals = low + np.searchsorted(cumulative, rng.uniform(size=n))
        return _split(totals.astype(np.int64), prompt_per_output)

    return draw


def _bounds(low: float, high: float, ratio: float) -> tuple[int, int]:
    """Of totals, in tokens; raises ValueError naming an argument that is wrong."""
    within("ratio", ratio, 0.0, MOST_TOKENS)
    least = num_tokens("low", low)
    return least, int(within("high", high, least, MOST_TOKENS))


def _split(totals: Ints, prompt_per_output: float) -> tuple[Ints, Ints]:
    outputs = np.maximum(1, np.rint(totals / (1.0 + prompt_per_output))).astype(np.int64)
    return np.maximum(1, totals - outputs), outputs


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """Published statistics of a dataset's column, in tokens."""

    median: float
    p90: float
    std: float


def from_statistics(prompt: LengthStatistics, output: LengthStatistics, max_total: int) -> Lengths:
    """Lengths whose median, P90 and standard deviation match published ones under a total cap.

    Each column is drawn by its quantile function: a power-law body below the median, a stretched
    tail through the P90, fitted so that the standard deviation agrees (see `_quantiles`). Prompt
    and output are independent; pairs above the cap are drawn again, as the paper filters them.
    """

    def draw(n: int, rng: Rng) -> tuple[Ints, Ints]:
        prompt_curve, output_curve = _quantiles(prompt, max_total), _quantiles(output, max_total)
        prompts, outputs = np.empty(0, np.int64), np.empty(0, np.int64)
        while len(prompts) < n:
            p = prompt_curve(rng.uniform(size=n))
            o = output_curve(rng.uniform(size=n))
            keep = p + o <= max_total
            prompts, outputs = np.append(prompts, p[keep]), np.append(outputs, o[keep])
        return prompts[:n], outputs[:n]

    return draw


@functools.lru_cache(maxsize=64)
def _quantiles(statistics: LengthStatistics, cap: int) -> Callable[[Floats], Ints]:
    """A quantile function through (1/2, median) and (0.9, P90) with the wanted deviation.

    Below the median u -> median * (2u)^a; from there a straight line to the P90, then a line to
    an end point. `a` and the end point are searched on a grid for the deviation, preferring a = 1
    (a uniform body, what both datasets resemble).
    """
    grid = (np.arange(2000) + 0.5) / 2000
    best: tuple[float, Callable[[Floats], Ints]] | None = None
    for power in (1.0, 0.8, 1.25, 0.6, 1.6, 0.4, 2.2):
        for end in np.geomspace(statistics.p90, max(statistics.p90, float(cap)), 40):
            curve = _curve(statistics, power, float(end))
            error = abs(float(curve(grid).std()) / statistics.std - 1.0) + 0.01 * abs(power - 1.0)
            if best is None or error < best[0]:
                best = (error, curve)
    if best is None:
        raise ValueError("the grid of candidate curves is empty")
    return best[1]


def _curve(statistics: LengthStatistics, power: float, end: float) -> Callable[[Floats], Ints]:
    median, p90 = statistics.median, statistics.p90

    def curve(u: Floats) -> Ints:
        body = median * (2.0 * u) ** power
        middle = median + (p90 - median) * (u - 0.5) / 0.4
        tail = p90 + (end - p90) * (u - 0.9) / 0.1
        value = np.where(u < 0.5, body, np.where(u < 0.9, middle, tail))
        return np.maximum(1, np.rint(value)).astype(np.int64)

    return curve


def sharegpt4() -> Lengths:
    """openchat_sharegpt4, from the statistics the paper publishes (section 5, Table 2).

    The output deviation is that of the released trace (266); the paper prints 101, which its own
    median and P90 exclude.
    """
    return from_statistics(
        LengthStatistics(1730, 5696, 2088), LengthStatistics(415, 834, 266), 8192
    )


# Prompts and outputs of arxiv_summarization.
ARXIV = (LengthStatistics(7059, 12985, 3638), LengthStatistics(208, 371, 265))


def arxiv_summarization() -> Lengths:
    """arxiv_summarization, from the statistics the paper publishes (output deviation as above)."""
    return from_statistics(*ARXIV, 16384)


def mixed(one: Lengths, other: Lengths, share: float = 0.5) -> Lengths:
    """Requests of two datasets in any order; share: of the second one."""
    within("share", share, 0.0, 1.0)

    def draw(n: int, rng: Rng) -> tuple[Ints, Ints]:
        is_other = rng.uniform(size=n) < share
        columns = zip(one(n, rng), other(n, rng), strict=True)
        prompts, outputs = (np.where(is_other, second, first) for first, second in columns)
        return prompts, outputs

    return draw


def scaled(lengths: Lengths, divisor: float) -> Lengths:
    """The same shape of lengths, every one divided: a workload for a smaller machine."""
    positive("the number behind '/'", divisor)

    def draw(n: int, rng: Rng) -> tuple[Ints, Ints]:
        prompts, outputs = lengths(n, rng)
        return (
            np.maximum(1, np.rint(prompts / divisor)).astype(np.int64),
            np.maximum(1, np.rint(outputs / divisor)).astype(np.int64),
        )

    return draw
