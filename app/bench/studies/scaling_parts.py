"""Parts of `legato bench scaling`: its arrivals, and the figures of each phase."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from app.bench.load.client import Job, Trace
from app.bench.load.figures import load_figures
from app.bench.load.workload import Load

FACTOR = 3.0
Looks = Sequence[tuple[float, int]]  # (seconds since the start, engines that serve)


@dataclass(frozen=True, slots=True)
class Phases:
    """Durations of the load's phases: at the base rate, at three times that, at the base rate."""

    before_s: float
    during_s: float
    after_s: float

    @property
    def total_s(self) -> float:
        return self.before_s + self.during_s + self.after_s


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """Client-side figures of a part of the run. kept: share of requests within both objectives."""

    name: str
    from_s: float
    to_s: float
    num_requests: int
    num_cut: int
    kept: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tbt_p50_ms: float
    tbt_p99_ms: float


@dataclass(frozen=True, slots=True)
class Tripled:
    """The arrivals of all three phases. qps: the base rate; None: it depends on the machine."""

    lengths: str
    qps: float | None
    phases: Phases
    seed: int = 0

    def jobs(self, qps: float) -> list[Job]:
        """In order of arrival."""
        jobs: list[Job] = []
        begin_s = 0.0
        phases = self.phases
        for number, (seconds, factor) in enumerate(
            ((phases.before_s, 1.0), (phases.during_s, FACTOR), (phases.after_s, 1.0))
        ):
            load = Load(self.lengths, factor * qps, seconds, seed=self.seed + number)
            jobs += [
                replace(job, arrival_s=begin_s + job.arrival_s)
                for job in load.jobs()
                if job.arrival_s < seconds
            ]
            begin_s += seconds
        return jobs


def mean_prompt_tokens(lengths: str) -> float:
    """Mean length of a thousand prompts."""
    return mean(job.num_prompt_tokens for job in Load(lengths, 1.0, 1000.0).jobs())


def changes(looks: Looks) -> list[dict[str, float]]:
    """When the number of engines changed, and to what; the first is the number at the start."""
    found: list[dict[str, float]] = []
    for at_s, count in looks:
        if not found or found[-1]["engines"] != count:
            found.append({"at_s": round(at_s, 1) if found else 0.0, "engines": count})
    return found


def joins(looks: Looks) -> list[float]:
    """When engines joined those of the start, in seconds since the start."""
    found: list[float] = []
    most = 0
    for at_s, count in looks:
        if most and count > most:
            found += [at_s] * (count - most)
        most = max(most, count)
    return found


def parts_of(
    traces: Sequence[Trace], looks: Looks, phases: Phases, objectives: Mapping[str, float | None]
) -> list[PhaseFigures]:
    """Client-side figures by arrival: before the rise, until engines joined, with them, after."""
    rise_s, fall_s = phases.before_s, phases.before_s + phases.during_s
    whole_s = max([at_s for at_s in joins(looks) if rise_s < at_s < fall_s], default=rise_s)
    bounds = [
        ("before", 0.0, rise_s),
        ("tripled, engines starting", rise_s, whole_s),
        ("tripled, all engines", whole_s, fall_s),
        ("after", fall_s, math.inf),
    ]
    return [
        _part(name, from_s, to_s, chosen, objectives)
        for name, from_s, to_s in bounds
        if (chosen := [t for t in traces if from_s <= t.job.arrival_s < to_s])
    ]


def _part(
    name: str,
    from_s: float,
    to_s: float,
    traces: Sequence[Trace],
    objectives: Mapping[str, float | None],
) -> PhaseFigures:
    figures = load_figures(traces, **objectives)
    return PhaseFigures(
        name,
        round(from_s, 1),
        round(to_s if math.isfinite(to_s) else traces[-1].job.arrival_s, 1),
        figures.num_requests,
        figures.num_failed,
        round(figures.goodput_qps * figures.span_s) / len(traces),
        figures.ttft_p50_ms,
        figures.ttft_p99_ms,
        figures.tbt_p50_ms,
        figures.tbt_p99_ms,
    )


def whole(traces: Sequence[Trace], objectives: Mapping[str, float | None]) -> dict[str, float]:
    figures = load_figures(traces, **objectives)
    return {"ttft_p50_ms": figures.ttft_p50_ms, "goodput_qps": figures.goodput_qps}
