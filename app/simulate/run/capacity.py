"""Capacity: the highest load that meets its objectives (Sarathi-Serve, section 5.1).

A load passes when P99 TBT <= objective and the median scheduling delay <= 2 s. The search brackets
the capacity by doubling or halving from a guess and bisects until the bracket is narrower than
`tolerance`. Every probe serves the same requests at another rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from app.simulate.run.record import RunRecord, Summary
from app.simulate.run.simulation import Deployment, simulate
from app.simulate.workload.requests import Workload
from app.simulate.workload.specs import Traffic

MEDIAN_DELAY_LIMIT_S = 2.0


@dataclass(frozen=True, slots=True)
class Probe:
    """One load tried. given_up: stopped early because it could no longer pass."""

    qps: float
    passed: bool
    tbt_p99: float
    scheduling_delay_p50: float
    ttft_p50: float
    given_up: bool

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class FoundCapacity:
    """qps: the highest load that passed (0 if none). limit: the limit that the next load broke."""

    qps: float
    limit: str
    probes: tuple[Probe, ...]
    summary: Summary | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "qps": self.qps,
            "limit": self.limit,
            "probes": [p.to_dict() for p in self.probes],
            "summary": self.summary.to_dict() if self.summary else None,
        }


def search_capacity(
    deployment: Deployment,
    traffic: Traffic,
    tbt_s: float,
    *,
    guess_qps: float = 1.0,
    stride: float = 2.0,
    tolerance: float = 0.025,
    delay_limit_s: float = MEDIAN_DELAY_LIMIT_S,
    max_probes: int = 16,
    on_probe: Callable[[Probe], None] | None = None,
) -> FoundCapacity:
    """Search the capacity of one deployment under one workload and one P99 TBT objective.

    stride: from a guess to the next load, until one has passed and one has not.
    """
    probes: list[Probe] = []
    best: Summary | None = None
    low, high = 0.0, math.inf
    qps = guess_qps
    while len(probes) < max_probes:
        probe, summary = probe_load(
            deployment, traffic.at(qps), qps, tbt_s, delay_limit_s, traffic.seed
        )
        probes.append(probe)
        if on_probe is not None:
            on_probe(probe)
        if probe.passed:
            low, best = qps, summary
        else:
            high = qps
        if high == math.inf:
            # Far from saturation there is no delay, so a larger stride is safe.
            qps *= stride
        elif low == 0.0:
            qps /= stride
            if qps < guess_qps * 1e-3:
                break
        elif (high - low) / high <= tolerance:
            break
        else:
            qps = (low + high) / 2.0
    failed = [p for p in probes if not p.passed]
    nearest = min(failed, key=lambda p: p.qps, default=None)
    return FoundCapacity(low, _limit(nearest, tbt_s), tuple(probes), best)


def _limit(failed: Probe | None, tbt_s: float) -> str:
    """The limit that the load just above capacity broke, in words."""
    if failed is None:
        return "none"
    return "P99 TBT" if failed.tbt_p99 > tbt_s else "scheduling delay"


def probe_load(
    deployment: Deployment,
    base: Workload,
    qps: float,
    tbt_s: float,
    delay_limit_s: float = MEDIAN_DELAY_LIMIT_S,
    seed: int = 0,
) -> tuple[Probe, Summary]:
    """Serve `base` at `qps` and judge it."""
    workload = base.at_rate(qps)
    stop = _CannotPass(workload, tbt_s, delay_limit_s)
    result = simulate(workload, deployment, seed=seed, should_stop=stop)
    summary = result.summary()
    slack = 1.0 + 1e-9  # sums of floats
    passed = (
        not stop.gave_up
        and summary.tbt_p99 <= tbt_s * slack
        and summary.scheduling_delay_p50 <= delay_limit_s
        and summary.num_completed == len(workload)
    )
    probe = Probe(
        qps,
        passed,
        summary.tbt_p99,
        summary.scheduling_delay_p50,
        summary.ttft_p50,
        stop.gave_up,
    )
    return probe, summary


class _CannotPass:
    """True once a probe can no longer pass."""

    def __init__(self, workload: Workload, tbt_s: float, delay_limit_s: float) -> None:
        num_gaps = int(workload.output_tokens.sum()) - len(workload)
        self._allowed_gaps = 0.01 * num_gaps + 1
        self._half = len(workload) // 2 + 1
        self._tbt_s, self._delay_limit_s = tbt_s * (1.0 + 1e-9), delay_limit_s
        self._late_gaps = 0
        self._seen_gaps = 0
        self.gave_up = False

    def __call__(self, record: RunRecord, arrived: int) -> bool:
        fresh = np.array(record.gaps_s[self._seen_gaps :])
        self._seen_gaps += len(fresh)
        self._late_gaps += int((fresh > self._tbt_s).sum())
        now_s = record.arrival_s[arrived - 1]
        arrival = np.array(record.arrival_s[:arrived])
        started = np.array(record.started_s[:arrived])
        waited = np.where(np.isnan(started), now_s, started) - arrival
        waited += np.array(record.handover_s[:arrived])
        late_starts = int((waited > self._delay_limit_s).sum())
        self.gave_up = self._late_gaps > self._allowed_gaps or late_starts > self._half
        return self.gave_up
