"""Timing CPU kernels in turns with the machine's ceilings.

The limit of a kernel is max(bytes / bandwidth, FLOPs / peak): what it must read is read once, and
every multiply-add is done at the rate the cores reach from registers. Both ceilings and all cases
take turns in short rounds, and each figure is a low quantile of its samples, so that a core lent
to another process for some milliseconds spoils samples and not the comparison.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from app.bench.ceilings import Ceilings
from app.bench.terminal import progress
from kernels.cpu import library
from kernels.huge_pages import map_zeros

QUANTILE = 0.1
CACHE_BYTES = 96 << 20  # the memory that one case goes through holds at least this much
_READ_FLOATS = 1 << 20  # of one sample of the bandwidth
_PEAK_COUNT, _PEAK_TASKS = 100_000, 32  # of one sample of the peak
_PEAK_SAMPLES = 10  # a round


@dataclass(slots=True)
class KernelCase:
    """One kernel on one input.

    labels: what tells it from other cases, as the report has it. num_bytes, flops: of one call.
    sample: calls it several times, each on other memory; seconds of each call. per_model: how many
    such calls a decode step makes.
    """

    labels: Mapping[str, Any]
    num_bytes: float
    flops: float
    sample: Callable[[], list[float]]
    per_model: int = 1
    samples_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class KernelFigures:
    """Time and rates of a case; `ratio` is time over limit."""

    labels: Mapping[str, Any]
    time_us: float
    gb_s: float
    gflop_s: float
    ratio: float

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.labels,
            "time_us": self.time_us,
            "gb_s": self.gb_s,
            "gflop_s": self.gflop_s,
            "ratio": self.ratio,
        }

    def cells(self) -> tuple[str, str, str, str]:
        """Table cells, in the order of `COLUMNS`."""
        return (
            f"{self.time_us:.1f}", f"{self.gb_s:.1f}", f"{self.gflop_s:.0f}", f"{self.ratio:.2f}",
        )  # fmt: skip


COLUMNS = ("us", "GB/s", "GFLOP/s", "time / limit")


def timed(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Run the calls in order; returns the seconds of each."""
    seconds = []
    for call in calls:
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return seconds


def low_quantile(samples: Sequence[float]) -> float:
    return sorted(samples)[int(len(samples) * QUANTILE)]


def measure_cases(cases: Sequence[KernelCase], rounds: int) -> Ceilings:
    """Fill the cases' samples; the ceilings are measured between them."""
    floats = map_zeros(CACHE_BYTES).view(torch.float32)  # on huge pages, like weights
    floats += 1.0  # touched: untouched pages are all the same zero page
    starts = range(0, floats.numel(), _READ_FLOATS)
    reads = [partial(library.stream_read, floats[at : at + _READ_FLOATS]) for at in starts]
    read_s: list[float] = []
    multiply_s: list[float] = []
    multiply = partial(library.multiply_in_registers, _PEAK_COUNT, _PEAK_TASKS)
    flops = multiply()
    with torch.inference_mode():
        for _ in progress(range(rounds), "rounds"):
            read_s += timed(reads)
            multiply_s += timed([multiply] * _PEAK_SAMPLES)
            for case in cases:
                case.samples_s += case.sample()
    return Ceilings(
        _READ_FLOATS * 4 / low_quantile(read_s) / 1e9, flops / low_quantile(multiply_s) / 1e9
    )


def figures_of(case: KernelCase, ceilings: Ceilings) -> KernelFigures:
    """Figures of one call."""
    time_s = low_quantile(case.samples_s)
    return _figures(case.labels, time_s, case.num_bytes, case.flops, ceilings)


def step_figures(
    labels: Mapping[str, Any], cases: Sequence[KernelCase], ceilings: Ceilings
) -> KernelFigures:
    """Figures of all calls of a decode step together, each case as often as in a step."""
    time_s = sum(low_quantile(case.samples_s) * case.per_model for case in cases)
    num_bytes = sum(case.num_bytes * case.per_model for case in cases)
    flops = sum(case.flops * case.per_model for case in cases)
    return _figures(labels, time_s, num_bytes, flops, ceilings)


def _figures(
    labels: Mapping[str, Any], time_s: float, num_bytes: float, flops: float, ceilings: Ceilings
) -> KernelFigures:
    return KernelFigures(
        labels,
        time_us=time_s * 1e6,
        gb_s=num_bytes / time_s / 1e9,
        gflop_s=flops / time_s / 1e9,
        ratio=time_s / ceilings.limit_s(num_bytes, flops),
    )
