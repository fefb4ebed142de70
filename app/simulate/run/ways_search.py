"""Where the work runs: what colocated, split and flexible engines hold on the same GPUs.

Of the kinds of engines that are worth dividing (`kinds`) every way is searched for the division of
the engines into those that only compute prompts and the rest: from a likely one in both directions,
as long as a division passes a load above the best one so far. All of it is determined by the
question.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.simulate.run.capacity import FoundCapacity, probe_load, search_capacity
from app.simulate.run.config_search import Candidate, CandidateResult
from app.simulate.run.kinds import TOLERANCE, Question
from app.simulate.run.processes import each
from app.simulate.run.record import Summary
from app.simulate.run.simulation import Deployment
from app.simulate.run.work import Work

STRIDE = 1.25  # from a guess; loads far beyond capacity take longest to simulate
HOPELESS = 0.25  # of a guess: a division that fails there is left out where another holds nothing
MOST_PROBES = 12
LEAST_SHARE = 5.0  # see `warning`
SAYS_NOTHING = 0.05  # other requests change a capacity by as much


@dataclass(frozen=True, slots=True)
class Layout:
    """Engines of one kind on all GPUs. num_prefill: those that only compute prompts."""

    kind: Candidate
    way: str
    num_engines: int
    num_prefill: int = 0

    @property
    def engines(self) -> str:
        return self.kind.label.replace(f" {self.kind.policy}", "")

    @property
    def label(self) -> str:
        if not self.num_prefill:
            return f"{self.way} {self.num_engines}"
        return f"{self.way} {self.num_prefill}+{self.num_engines - self.num_prefill}"


@dataclass(frozen=True, slots=True)
class LayoutResult:
    """The best layout of a kind and way. figures: at its capacity; None: it holds no load.

    tried: capacity by number of engines for prompts; None: it did not pass a load above the best.
    """

    layout: Layout
    qps: float
    qps_per_gpu: float
    limit: str
    figures: Summary | None
    tried: Mapping[int, float | None]

    def to_dict(self) -> dict[str, Any]:
        kind, figures = self.layout.kind, self.figures
        return {
            "tensor_ranks": kind.tensor_ranks,
            "num_stages": kind.num_stages,
            "budget": kind.budget,
            "token_budget": kind.token_budget if kind.budget == "fixed" else None,
            "way": self.layout.way,
            "prefill_engines": self.layout.num_prefill,
            "other_engines": self.layout.num_engines - self.layout.num_prefill,
            "capacity_qps": self.qps,
            "capacity_qps_per_gpu": self.qps_per_gpu,
            "limit": self.limit,
            "at_capacity": figures.to_dict() if figures else None,
            "divisions_qps": {str(number): qps for number, qps in self.tried.items()},
        }


def search_ways(
    kinds: Sequence[CandidateResult],
    question: Question,
    workers: int = 1,
    on_found: Callable[[], None] | None = None,
) -> list[LayoutResult]:
    """The best layout of each kind and way, those that hold most first."""
    asked = [(kind, way, question) for kind, way in pairs(kinds, question)]
    found = each(best_layout, asked, workers, on_found)
    return sorted(found, key=lambda result: -result.qps)


def pairs(
    kinds: Sequence[CandidateResult], question: Question
) -> list[tuple[CandidateResult, str]]:
    """What is searched: each kind in each way that can divide its engines."""
    return [
        (kind, way)
        for kind in kinds
        for way in question.ways
        if way == "colocated" or kind.candidate.num_devices < question.num_gpus
    ]


def best_layout(kind: CandidateResult, way: str, question: Question) -> LayoutResult:
    """The division of this kind's engines that holds most."""
    candidate = kind.candidate
    model = candidate.cost_model()
    config = candidate.config(model, question.tbt_s)
    traffic = question.traffic.read()
    num_engines = question.num_gpus // candidate.num_devices
    whole_qps = num_engines * kind.capacity_qps

    def deployment(num_prefill: int) -> Deployment:
        division = None
        if question.division is not None and way != "colocated":
            division = replace(question.division, way=way, num_prefill=num_prefill)
        return Deployment(
            config, model, num_replicas=num_engines, routing="slack", division=division
        )

    def capacity(num_prefill: int, guess_qps: float) -> FoundCapacity:
        return search_capacity(
            deployment(num_prefill), traffic, question.tbt_s,
            guess_qps=guess_qps, stride=STRIDE, tolerance=TOLERANCE, max_probes=MOST_PROBES,
        )  # fmt: skip

    def passes(num_prefill: int, qps: float) -> bool:
        there = deployment(num_prefill)
        return probe_load(there, traffic.at(qps), qps, question.tbt_s, seed=traffic.seed)[0].passed

    start, guess_qps = 0, whole_qps
    if way == "split":
        work = Work.of(model, traffic.at(1.0))
        start = work.divisions(num_engines)[0]
        guess_qps *= work.qps(start, num_engines) / work.qps(0, num_engines)
    elif way != "colocated":
        start = 1
    best_number, best = start, capacity(start, guess_qps)
    tried: dict[int, float | None] = {start: best.qps}
    for step in (1, -1) if start else ():
        number = start + step
        while 0 < number < num_engines:
            least_qps = (1.0 + TOLERANCE) * best.qps or guess_qps * HOPELESS
            if not passes(number, least_qps):
                tried[number] = None
                break
            found = capacity(number, least_qps)
            tried[number] = found.qps
            if found.qps <= best.qps:
                break
            best_number, best = number, found
            number += step
    return LayoutResult(
        Layout(candidate, way, num_engines, best_number),
        best.qps, best.qps / question.num_gpus, best.limit, best.summary, tried,
    )  # fmt: skip


def advice(results: Sequence[LayoutResult], question: Question) -> str:
    """One sentence: where the work should run, and what the other ways hold of colocated."""
    best = {way: _best(results, way) for way in question.ways}
    base = best.pop("colocated")
    assert base is not None
    others = [result for result in best.values() if result is not None]
    objective = f"a P99 TBT of {1e3 * question.tbt_s:.3g} ms"
    ahead = max(others, key=lambda result: result.qps, default=base)
    if not base.qps:
        if not ahead.qps:
            return f"Nothing holds a load under {objective}."
        return f"Choose {_words(ahead)}: colocated engines hold no load under {objective}."
    held = [
        f"{result.layout.label} holds {ratio:.2f} of colocated"
        + (", which says nothing" if abs(ratio - 1.0) <= SAYS_NOTHING else "")
        for result in others
        for ratio in (result.qps / base.qps,)
    ]
    chosen = ahead if ahead.qps > (1.0 + SAYS_NOTHING) * base.qps else base
    if not held:
        return f"Choose {_words(base)} under {objective}."
    why = "" if chosen is not base else ", which is simpler"
    return f"Choose {_words(chosen)}{why}: under {objective}, {' and '.join(held)}."


def _words(result: LayoutResult) -> str:
    return f"{result.layout.label} of {result.layout.engines}"


def _best(results: Sequence[LayoutResult], way: str) -> LayoutResult | None:
    return max((r for r in results if r.layout.way == way), key=lambda r: r.qps, default=None)


def warning(results: Sequence[LayoutResult], num_requests: int) -> str:
    """Where the runs are too short for their figures, in words; else ""."""
    shares = [
        num_requests / result.qps / result.figures.e2e_p50
        for result in results
        if result.figures is not None
    ]
    least = min(shares, default=math.inf)
    if least >= LEAST_SHARE:
        return ""
    return (
        f"Capacities are overstated: requests arrive for {least:.1f} times as long as the median "
        f"one takes, and below {LEAST_SHARE:g} times streams only gather. Give more --requests."
    )
