"""Parts of `legato bench ways`: a case, its first guess, the search of its capacity, its row.

Divided engines have a division to be found as well. Split ones start with that in balance by the
cost model; another is searched only if it passes a load above the best one so far.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from app.bench.report import commit
from app.bench.studies.ways_ledger import Ledger
from app.bench.studies.ways_loads import CONVERSATIONS, OBJECTIVES, requests_at, tight_s, work_of
from app.simulate.hardware.deployments import load_model
from app.simulate.hardware.interconnect import (
    INTERCONNECTS,
    kv_bytes_per_token,
    parse_interconnect,
    shape_of,
)
from app.simulate.paper.published import PaperDeployment
from app.simulate.run.capacity import Probe, probe_load
from app.simulate.run.deployment import Deployment, Division
from app.simulate.run.record import Summary
from app.simulate.run.simulation import SimulatedRun, scheduler_config, simulate
from app.simulate.run.work import Work

COMPARED = 0.5  # of the colocated capacity: the load at which latencies are compared
TOLERANCE = 0.05  # the next load that was tried, and failed, is at most so far above a capacity
STRIDE = 1.1  # from one load to the next until one passes and one does not; it grows
SHORT_STRIDE = (1.0 + TOLERANCE) * (1.0 - 1e-9)  # from where an earlier run ended
LEAST_REQUESTS = 20
ANY_LINK = next(iter(INTERCONNECTS))  # between colocated engines, where nothing moves


class Place(NamedTuple):
    """A way, its engines for prompts, and what joins the engines."""

    way: str
    num_prefill: int
    link: str


@dataclass(frozen=True, slots=True)
class Case:
    """One deployment, dataset and objective, on a number of engines."""

    deployment: PaperDeployment
    dataset: str
    slo: str
    num_engines: int
    num_requests: int
    seed: int

    @property
    def tbt_s(self) -> float:
        if self.slo == "tight":
            return tight_s(self.deployment.model, self.deployment.slo_s("strict"))
        return self.deployment.slo_s(self.slo)

    @property
    def work(self) -> Work:
        return work_of(self.deployment.model, self.dataset)

    def key(self, way: str, link: str, slo: str = "") -> str:
        """Names a row. slo: another objective's."""
        return (
            f"{self.deployment.model}|{self.dataset}|{slo or self.slo}|{way}|{link}"
            f"|{self.num_engines}|{self.num_requests}|{self.seed}"
        )

    def divided(self, way: str, num_prefill: int, link: str) -> Deployment:
        model = load_model(self.deployment.model)
        many_stages = model.num_stages > 1  # then work is spread over them
        config = scheduler_config(
            model,
            budget="adaptive",
            tbt_s=self.tbt_s,
            micro_batches="uniform" if many_stages else "greedy",
            overlap_chunks=many_stages,
        )
        kv_bytes = kv_bytes_per_token(shape_of(model.name))
        division = Division(
            way,
            num_prefill,
            parse_interconnect(link or ANY_LINK),
            kv_bytes,
            shares_prefixes=self.dataset == CONVERSATIONS,
        )
        return Deployment(
            config, model, num_replicas=self.num_engines, routing="slack", division=division
        )

    def probe(self, deployment: Deployment, qps: float) -> tuple[Probe, Summary]:
        base = requests_at(qps, self.dataset, self.num_requests, self.seed)
        return probe_load(deployment, base, qps, self.tbt_s, seed=self.seed)

    def run(self, deployment: Deployment, qps: float) -> SimulatedRun:
        base = requests_at(qps, self.dataset, self.num_requests, self.seed)
        return simulate(base.at_rate(qps), deployment, seed=self.seed)

    def judged(self, at: Place, qps: float, ledger: Ledger) -> dict[str, Any]:
        """Whether a load passes, else the limit that it breaks, and figures at it."""

        def judge() -> dict[str, Any]:
            found, summary = self.probe(self.divided(*at), qps)
            limit = "P99 TBT" if found.tbt_p99 > self.tbt_s else "scheduling delay"
            seen = latencies(summary) if found.passed else None
            return {"passed": found.passed, "limit": limit, "at_load": seen}

        return ledger.load(f"{self.key(at.way, at.link)}|{at.num_prefill}|{qps!r}", judge)

    def capacity(
        self, at: Place, guess_qps: float, ledger: Ledger, stride: float = STRIDE
    ) -> Found:
        """The highest load that passes. It climbs or falls from a guess in small strides, since a
        load far beyond capacity takes longest to simulate, and bisects what is left."""
        low, high, limit = 0.0, math.inf, "none"
        best: dict[str, float] | None = None
        qps = guess_qps
        while high > (1.0 + TOLERANCE) * low and 1e-2 < qps / guess_qps < 1e2:
            found = self.judged(at, qps, ledger)
            if found["passed"]:
                low, best = qps, found["at_load"]
            else:
                high, limit = qps, found["limit"]
            if low and high < math.inf:
                qps = math.sqrt(low * high)
            else:
                qps = low * stride if low else high / stride
                stride *= STRIDE
        return Found(low, limit, best)


@dataclass(frozen=True, slots=True)
class Found:
    """The highest load that passed (0.0: none), the limit that the next one broke, and figures at
    it."""

    qps: float
    limit: str
    at_load: Mapping[str, float] | None


@dataclass(frozen=True, slots=True)
class Best:
    """The best division of a way. tried: the capacity of each that was searched, by its number of
    engines for prompts; None: it did not pass a load above the best one before it."""

    num_prefill: int
    found: Found
    tried: Mapping[int, float | None] = field(default_factory=dict)


def best_division(
    case: Case,
    way: str,
    link: str,
    order: Sequence[int],
    guess_qps: float,
    ledger: Ledger,
    stride: float = STRIDE,
) -> Best:
    """The division with the highest capacity. order: numbers of engines for prompts, the likeliest
    first."""
    best: Best | None = None
    tried: dict[int, float | None] = {}
    for num_prefill in order:
        at = Place(way, num_prefill, link)
        qps = guess_qps
        if best is not None and best.found.qps:
            qps = (1.0 + TOLERANCE) * best.found.qps
            if not case.judged(at, qps, ledger)["passed"]:
                tried[num_prefill] = None
                continue
        found = case.capacity(at, qps, ledger, stride)
        tried[num_prefill] = found.qps
        if best is None or found.qps > best.found.qps:
            best = Best(num_prefill, found)
    assert best is not None
    return replace(best, tried=tried)


def search(case: Case, way: str, link: str, ledger: Ledger) -> Best:
    """A capacity is sought from that of an earlier run, another objective or link on, else from the
    colocated one, or the cost model's."""
    rows = ledger.rows
    earlier = ledger.earlier((case.deployment.model, case.dataset, case.slo, way, link))
    stride = SHORT_STRIDE if earlier else STRIDE
    links = ("",) if way == "colocated" else (link, *INTERCONNECTS)
    near = [earlier, *(rows.get(case.key(way, t, slo)) for slo in OBJECTIVES for t in links)]
    known = next((row for row in near if row and row["capacity_qps"]), None)
    work, num_engines = case.work, case.num_engines
    if way == "colocated":
        guess_qps = known["capacity_qps"] if known else work.qps(0, num_engines)
        found = case.capacity(Place(way, 0, link), guess_qps, ledger, stride)
        return Best(0, found, {0: found.qps})
    if way == "split":
        order = work.divisions(num_engines)
        guess_qps = work.qps(order[0], num_engines)
    else:
        order = list(range(1, num_engines))
        guess_qps = rows[case.key("colocated", "")]["capacity_qps"]
    if known:
        first = known["prefill_engines"]
        order.sort(key=lambda n: n != first)
        guess_qps = known["capacity_qps"]
    guess_qps = guess_qps or work.qps(0, num_engines)
    return best_division(case, way, link, order, guess_qps, ledger, stride)


def latencies(summary: Summary) -> dict[str, float]:
    """longest_gap_p99_s: over requests, of the longest time between two tokens of each."""
    return {
        "ttft_p50_s": summary.ttft_p50,
        "ttft_p99_s": summary.ttft_p99,
        "tbt_p50_s": summary.tbt_p50,
        "tbt_p99_s": summary.tbt_p99,
        "longest_gap_p99_s": summary.max_tbt_p99,
        "scheduling_delay_p50_s": summary.scheduling_delay_p50,
        "e2e_p50_s": summary.e2e_p50,
        "num_preemptions": float(summary.num_preemptions),
    }


def figures(run: SimulatedRun) -> dict[str, float]:
    """Figures of one load: latencies, and what moved."""
    summary, moved = run.summary(), run.handovers
    assert moved is not None
    totals = moved.to_dict()
    return {
        **latencies(summary),
        "handover_p50_s": totals["handover_p50_s"],
        "handover_p99_s": totals["handover_p99_s"],
        "moved_share": moved.num_requests / summary.num_requests,
        "moved_gb_per_request": moved.num_bytes / 1e9 / summary.num_requests,
        "busiest_link": moved.busiest_link,
    }


def study(
    case: Case, ways: Sequence[str], links: Sequence[str], ledger: Ledger, compare: bool = True
) -> Iterator[dict[str, Any]]:
    """One row per way and link, the colocated one first, since the others are compared with it.
    compare: latencies too, at `COMPARED` of its capacity."""
    pairs = [("colocated", "")]
    pairs += [(way, link) for way in ways if way != "colocated" for link in links]
    for way, link in pairs:
        yield ledger.row(case.key(way, link), partial(measured, case, way, link, ledger, compare))


def measured(case: Case, way: str, link: str, ledger: Ledger, compare: bool) -> dict[str, Any]:
    """A row, searched. link: "" where nothing moves."""
    best = search(case, way, link, ledger)
    model = load_model(case.deployment.model)
    num_gpus = case.num_engines * model.tensor_ranks * model.num_stages
    found = best.found
    colocated = found.qps
    if way != "colocated":
        colocated = ledger.rows[case.key("colocated", "")]["capacity_qps"]
    compared_qps = COMPARED * colocated
    compared: dict[str, Any] | None = None
    if compared_qps and compare:
        deployment = case.divided(way, best.num_prefill, link)
        compared = ledger.load(
            f"{case.key(way, link)}|{best.num_prefill}|{compared_qps!r}|compared",
            lambda: figures(case.run(deployment, compared_qps)),
        )
    return {
        "deployment": case.deployment.model,
        "dataset": case.dataset,
        "slo": case.slo,
        "tbt_objective_s": case.tbt_s,
        "way": way,
        "interconnect": link,
        "prefill_engines": best.num_prefill,
        "other_engines": case.num_engines - best.num_prefill,
        "gpus": num_gpus,
        "capacity_qps": found.qps,
        "capacity_qps_per_gpu": found.qps / num_gpus,
        "over_colocated": found.qps / colocated if colocated else None,
        "limit": found.limit,
        "num_requests": case.num_requests,
        "seed": case.seed,
        "arrive_s": case.num_requests / found.qps if found.qps else None,
        "divisions_qps": {str(n): qps for n, qps in best.tried.items()},
        "commit": commit(),
        "at_capacity": found.at_load,
        "compared_qps": compared_qps,
        "compared": compared,
    }
