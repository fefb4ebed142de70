"""Where the work runs: what colocated, split and flexible engines hold on the same GPUs.

Kinds of engines that hold nothing, or far less on a GPU than the likeliest kind, are left out
first, by one engine each. Of the others every way is searched for the division of the engines into
those that only compute prompts and the rest: from a likely one in both directions, as long as a
division passes a load above the best one so far. All of it is determined by the question.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from app.simulate.run.capacity import FoundCapacity, probe_load, search_capacity
from app.simulate.run.config_search import Candidate, CandidateResult, each, judge
from app.simulate.run.deployment import Division
from app.simulate.run.record import Summary
from app.simulate.run.simulation import Deployment
from app.simulate.run.work import Work
from app.simulate.workload.specs import TrafficSpec

KEPT = 0.8  # kinds of engines that hold less of the best kind's capacity per GPU are left out
MOST_KINDS = 2
TOLERANCE = 0.025  # of a capacity
STRIDE = 1.25  # from a guess; loads far beyond capacity take longest to simulate
HOPELESS = 0.25  # of a guess: a division that fails there is left out where another holds nothing
MOST_PROBES = 12
LEAST_REQUESTS = 50  # of one engine
LEAST_SHARE = 5.0  # see `warning`
SAYS_NOTHING = 0.05  # other requests change a capacity by as much


@dataclass(frozen=True, slots=True)
class Question:
    """ways: colocated and others. division: of each of the others, but for its way and number."""

    traffic: TrafficSpec
    tbt_s: float
    num_gpus: int
    ways: tuple[str, ...]
    division: Division | None = None


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


def judge_kinds(
    options: Sequence[Candidate],
    question: Question,
    workers: int = 1,
    on_found: Callable[[], None] | None = None,
) -> list[CandidateResult]:
    """What one engine of each kind holds, with its share of the requests.

    First the kinds that hold most by the cost model, of all and of those that can be divided. Then
    the other degrees, which are searched if they hold `KEPT` of what these hold on a GPU; then the
    other budgets of the degrees that are kept, if they hold more than the first budget does.
    """

    def judged(asked: Sequence[tuple[Candidate, float]]) -> list[CandidateResult]:
        calls = [(c, _share(c, question), question.tbt_s, 1.0, least) for c, least in asked]
        return each(judge, calls, workers, on_found)

    degrees: dict[tuple[int, int], list[Candidate]] = {}
    for candidate in options:
        degrees.setdefault((candidate.tensor_ranks, candidate.num_stages), []).append(candidate)
    firsts = [of_degree[0] for of_degree in degrees.values()]
    likely = _likeliest(firsts, question)
    found = judged([(candidate, 0.0) for candidate in likely])
    least = KEPT * max([_per_gpu(v) for v in found], default=0.0)
    found += judged([(c, least * c.num_devices) for c in firsts if c not in likely])
    if not any(v.capacity_qps for v in found):
        return found + judged([(c, 0.0) for c in options if c not in firsts])
    kept = kinds_for(found, question.num_gpus)
    others = [
        (candidate, (1.0 + TOLERANCE) * v.capacity_qps)
        for v in kept
        for candidate in degrees[v.candidate.tensor_ranks, v.candidate.num_stages][1:]
    ]
    return found + judged(others)


def _share(candidate: Candidate, question: Question) -> TrafficSpec:
    """The requests of one engine."""
    traffic = question.traffic
    share = traffic.num_requests * candidate.num_devices // question.num_gpus
    return traffic._replace(num_requests=max(LEAST_REQUESTS, share))


def _likeliest(firsts: Sequence[Candidate], question: Question) -> list[Candidate]:
    """Those that hold most on a GPU by the cost model: of all, and of those that can be divided."""
    drawn = question.traffic.read().at(1.0)
    rates: dict[Candidate, float] = {}
    for candidate in firsts:
        with suppress(ValueError):  # it is impossible
            work = Work.of(candidate.cost_model(), drawn)
            rates[candidate] = work.qps(0, 1) / candidate.num_devices
    divisible = [c for c in rates if c.num_devices < question.num_gpus]
    best = [max(some, key=rates.__getitem__) for some in (list(rates), divisible) if some]
    return list(dict.fromkeys(best))


def kinds_for(verdicts: Sequence[CandidateResult], num_gpus: int) -> list[CandidateResult]:
    """The kinds of engines worth dividing, best first: of each degree the best budget.

    Raises ValueError where no kind holds a load.
    """
    able = [v for v in verdicts if v.capacity_qps]
    if not able:
        reasons = "; ".join(sorted({v.impossible for v in verdicts}))
        raise ValueError(f"no kind of engine on {num_gpus} GPUs holds a load: {reasons}")
    best: dict[tuple[int, int], CandidateResult] = {}
    for v in sorted(able, key=_per_gpu, reverse=True):
        best.setdefault((v.candidate.tensor_ranks, v.candidate.num_stages), v)
    ranked = list(best.values())
    least = KEPT * _per_gpu(ranked[0])
    kept = [v for v in ranked if _per_gpu(v) >= least][:MOST_KINDS]
    if all(v.candidate.num_devices == num_gpus for v in kept):  # one engine cannot be divided
        kept += [v for v in ranked if v.candidate.num_devices < num_gpus][:1]
    return kept


def _per_gpu(verdict: CandidateResult) -> float:
    return verdict.capacity_qps / verdict.candidate.num_devices


def fitting(
    options: Sequence[Candidate], num_gpus: int, ways: Sequence[str] = ("colocated",)
) -> list[Candidate]:
    """Kinds whose engines take all of so many GPUs. Raises ValueError where there is none, or none
    that the ways can divide."""
    fit = [c for c in options if not num_gpus % c.num_devices]
    if not fit:
        sizes = ", ".join(f"{n}" for n in sorted({c.num_devices for c in options}))
        raise ValueError(f"--gpus {num_gpus}: engines have {sizes} GPUs, which does not divide it")
    if len(ways) > 1 and all(c.num_devices == num_gpus for c in fit):
        raise ValueError(f"--ways: {num_gpus} GPUs have one engine, which is not divided")
    return fit


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
