"""Which kinds of engines are worth dividing by roles, for a search over ways (`ways_search`).

Kinds that hold nothing, or far less on a GPU than the likeliest kind, are left out, by one engine
each. What is searched does not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from app.simulate.run.config_search import Candidate, CandidateResult, judge
from app.simulate.run.deployment import Division
from app.simulate.run.processes import each
from app.simulate.run.work import Work
from app.simulate.workload.specs import TrafficSpec

KEPT = 0.8  # kinds of engines that hold less of the best kind's capacity per GPU are left out
MOST_KINDS = 2
TOLERANCE = 0.025  # of a capacity
LEAST_REQUESTS = 50  # of one engine


@dataclass(frozen=True, slots=True)
class Question:
    """ways: colocated and others. division: of each of the others, but for its way and number."""

    traffic: TrafficSpec
    tbt_s: float
    num_gpus: int
    ways: tuple[str, ...]
    division: Division | None = None


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
