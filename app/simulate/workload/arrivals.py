"""Arrival processes: functions of a rate that draw when requests come, in seconds.

Each raises ValueError naming an argument with which it could not draw."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from app.simulate.workload.arguments import positive, within

Rng = np.random.Generator
Floats = NDArray[np.float64]

Arrivals = Callable[[int, Rng], Floats]


def poisson(qps: float) -> Arrivals:
    """Independent arrivals: exponential gaps."""
    positive("the rate", qps)
    return lambda n, rng: np.cumsum(rng.exponential(1.0 / qps, n))


def gamma(qps: float, cv: float = 0.5) -> Arrivals:
    """Gamma gaps with variation coefficient `cv`: steadier than Poisson below 1."""
    positive("the rate", qps)
    shape = 1.0 / (positive("cv", cv) ** 2)
    return lambda n, rng: np.cumsum(rng.gamma(shape, 1.0 / (qps * shape), n))


def fixed_interval(qps: float) -> Arrivals:
    """One request every 1/qps seconds."""
    positive("the rate", qps)
    return lambda n, rng: np.arange(1, n + 1) / qps


def bursty(qps: float, burst: float = 4.0, on_s: float = 10.0, off_s: float = 30.0) -> Arrivals:
    """On-off modulated Poisson: `burst` times the off rate while on, mean rate `qps`."""
    for name, value in (("the rate", qps), ("burst", burst), ("on_s", on_s), ("off_s", off_s)):
        positive(name, value)
    off_rate = qps * (on_s + off_s) / (burst * on_s + off_s)

    def draw(n: int, rng: Rng) -> Floats:
        out = np.empty(n)
        now, filled, on = 0.0, 0, False
        while filled < n:
            span = rng.exponential(on_s if on else off_s)
            count = min(int(rng.poisson(span * off_rate * (burst if on else 1.0))), n - filled)
            out[filled : filled + count] = now + np.sort(rng.uniform(0.0, span, count))
            filled, now, on = filled + count, now + span, not on
        return out

    return draw


def diurnal(qps: float, swing: float = 0.6, period_s: float = 86_400.0) -> Arrivals:
    """Poisson whose rate follows a day: qps * (1 - swing * cos(2 pi t / period)), by thinning."""
    positive("the rate", qps)
    within("swing", swing, 0.0, 1.0)
    positive("period_s", period_s)
    peak = qps * (1.0 + swing)

    def draw(n: int, rng: Rng) -> Floats:
        kept: list[Floats] = []
        now, count = 0.0, 0
        while count < n:
            times = now + np.cumsum(rng.exponential(1.0 / peak, max(1024, n)))
            rate = qps * (1.0 - swing * np.cos(2.0 * math.pi * times / period_s))
            times_kept = times[rng.uniform(0.0, peak, len(times)) < rate]
            kept.append(times_kept)
            count += len(times_kept)
            now = float(times[-1])
        return np.concatenate(kept)[:n]

    return draw
