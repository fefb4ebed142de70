"""`legato bench ways`: prompts and streams on the same engines, on separate ones, or in between.

Simulated, at equal hardware: the same number of engines, each a deployment of the paper, behind one
router, with the adaptive budget. A load passes as in the paper: P99 TBT meets the objective, and
the median scheduling delay, the wait at a second engine included, is at most 2 s. Where engines are
divided, every division is tried and the best one counts.

Requests must arrive for several times as long as one takes: in a shorter run streams only gather,
and engines seem to need no time to decode.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from app.bench.report import make_report, publish
from app.bench.terminal import Json, Out, console, output, table
from app.simulate.hardware.deployments import load_model
from app.simulate.hardware.interconnect import (
    INTERCONNECTS,
    kv_bytes_per_token,
    parse_interconnect,
    shape_of,
)
from app.simulate.paper.published import DATASETS, DEPLOYMENTS, SLOS, PaperDeployment
from app.simulate.run.capacity import Probe, probe_load
from app.simulate.run.deployment import Deployment, Division
from app.simulate.run.record import Summary
from app.simulate.run.simulation import SimulatedRun, scheduler_config, simulate
from app.simulate.tables import number
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.requests import generate
from app.simulate.workload.specs import parse_lengths

COMPARED = 0.5  # of the colocated capacity: the load at which latencies are compared
TOLERANCE = 0.06  # of a capacity
STRIDE = 1.12  # from one load to the next until one passes and one does not; it grows


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
        return self.deployment.slo_s(self.slo)

    def divided(self, way: str, num_prefill: int, interconnect: str) -> Deployment:
        model = load_model(self.deployment.model)
        many_stages = model.num_stages > 1  # then with the engine's default for such a budget
        config = scheduler_config(
            model,
            budget="adaptive",
            tbt_s=self.tbt_s,
            micro_batches="uniform" if many_stages else "greedy",
            overlap_chunks=many_stages,
        )
        kv_bytes = kv_bytes_per_token(shape_of(model.name))
        division = Division(way, num_prefill, parse_interconnect(interconnect), kv_bytes)
        return Deployment(
            config, model, num_replicas=self.num_engines, routing="slack", division=division
        )

    def probe(self, deployment: Deployment, qps: float) -> tuple[Probe, Summary]:
        lengths = parse_lengths(self.dataset)
        base = generate(poisson(1.0), lengths, self.num_requests, seed=self.seed)
        return probe_load(deployment, base, qps, self.tbt_s, seed=self.seed)

    def capacity(
        self, deployment: Deployment, guess_qps: float
    ) -> tuple[float, str, Summary | None]:
        """The highest load that passes, the limit that the next one broke, and figures there.

        Capacities of the ways are near to each other, so it climbs from a guess in small strides.
        """
        low, high, limit, stride = 0.0, math.inf, "none", STRIDE
        best: Summary | None = None
        qps = guess_qps
        while high > (1.0 + TOLERANCE) * low and 1e-2 < qps / guess_qps < 1e2:
            found, summary = self.probe(deployment, qps)
            if found.passed:
                low, best = qps, summary
            else:
                high = qps
                limit = "P99 TBT" if found.tbt_p99 > self.tbt_s else "scheduling delay"
            if low and high < math.inf:
                qps = math.sqrt(low * high)
            else:
                qps = low * stride if low else high / stride
                stride *= STRIDE
        return low, limit, best

    def run(self, deployment: Deployment, qps: float) -> SimulatedRun:
        lengths = parse_lengths(self.dataset)
        base = generate(poisson(1.0), lengths, self.num_requests, seed=self.seed)
        return simulate(base.at_rate(qps), deployment, seed=self.seed)


def latencies(summary: Summary) -> dict[str, float]:
    """longest_gap_p99_s: over requests, of the longest time between two tokens of each."""
    return {
        "ttft_p50_s": summary.ttft_p50,
        "ttft_p99_s": summary.ttft_p99,
        "tbt_p50_s": summary.tbt_p50,
        "tbt_p99_s": summary.tbt_p99,
        "longest_gap_p99_s": summary.max_tbt_p99,
        "scheduling_delay_p50_s": summary.scheduling_delay_p50,
        "num_preemptions": float(summary.num_preemptions),
    }


def figures(run: SimulatedRun) -> dict[str, float]:
    """Of one load: latencies, and what moved."""
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


@dataclass(frozen=True, slots=True)
class Best:
    """The best division of a way, its capacity, the limit that the next load broke, and figures at
    capacity."""

    num_prefill: int
    qps: float
    limit: str
    summary: Summary | None


def best_division(
    case: Case, way: str, interconnect: str, guess_qps: float, faster: Best | None
) -> Best:
    """The division with the highest capacity.

    A division is searched only if it passes a load above the best one so far. faster: the best one
    over a faster interconnect; if the same passes over this one, no other is tried.
    """
    if faster is not None and faster.qps:
        deployment = case.divided(way, faster.num_prefill, interconnect)
        found, summary = case.probe(deployment, faster.qps)
        if found.passed:
            return replace(faster, summary=summary)
    middle = case.num_engines // 2
    best: Best | None = None
    for num_prefill in sorted(range(1, case.num_engines), key=lambda n: (abs(n - middle), n)):
        deployment = case.divided(way, num_prefill, interconnect)
        qps = guess_qps
        if best is not None:
            qps = (1.0 + TOLERANCE) * best.qps or guess_qps / 4
            if not case.probe(deployment, qps)[0].passed:
                continue
        best = Best(num_prefill, *case.capacity(deployment, qps))
    assert best is not None
    return best


def study(case: Case) -> Iterator[dict[str, Any]]:
    """One row per way and interconnect, the colocated one first."""
    model = load_model(case.deployment.model)
    num_gpus = case.num_engines * model.tensor_ranks * model.num_stages
    guess = case.deployment.guesses[DATASETS.index(case.dataset)] * case.num_engines
    links = sorted(INTERCONNECTS, key=lambda name: -INTERCONNECTS[name].bytes_per_s)
    colocated = Best(0, *case.capacity(case.divided("colocated", 0, links[0]), guess))
    bests = [("colocated", links[0], colocated)]
    for way in ("split", "flexible"):
        best: Best | None = None
        for link in links:
            best = best_division(case, way, link, colocated.qps or guess, best)
            bests.append((way, link, best))
    for way, link, best in bests:
        deployment = case.divided(way, best.num_prefill, link)
        compared_qps = COMPARED * colocated.qps
        yield {
            "deployment": case.deployment.model,
            "dataset": case.dataset,
            "slo": case.slo,
            "tbt_objective_s": case.tbt_s,
            "way": way,
            "interconnect": "" if way == "colocated" else link,
            "prefill_engines": best.num_prefill,
            "other_engines": case.num_engines - best.num_prefill,
            "gpus": num_gpus,
            "capacity_qps": best.qps,
            "capacity_qps_per_gpu": best.qps / num_gpus,
            "over_colocated": best.qps / colocated.qps if colocated.qps else None,
            "num_requests": case.num_requests,
            "limit": best.limit,
            "at_capacity": latencies(best.summary) if best.summary else None,
            "compared_qps": compared_qps,
            "compared": figures(case.run(deployment, compared_qps)) if compared_qps else None,
        }


COLUMNS = (
    "deployment", "dataset", "slo", "way", "interconnect", "engines", "QPS/GPU", "over colocated",
    "limit", "TTFT", "P99 TTFT", "P99 TBT", "P99 longest gap", "GB/request",
)  # fmt: skip


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table; latencies are those at the load that is compared."""
    there, over = row["compared"] or {}, row["over_colocated"]
    return (
        *(row[name] for name in ("deployment", "dataset", "slo", "way")),
        row["interconnect"] or "-",
        f"{row['prefill_engines']}+{row['other_engines']}",
        f"{row['capacity_qps_per_gpu']:.3g}",
        number(over),
        row["limit"],
        *(
            number(there.get(name))
            for name in ("ttft_p50_s", "ttft_p99_s", "tbt_p99_s", "longest_gap_p99_s")
        ),
        number(there.get("moved_gb_per_request")),
    )


def command(
    context: typer.Context,
    deployments: Annotated[
        str, typer.Option(help="Cost models of the paper, separated by commas; all if empty.")
    ] = "",
    engines: Annotated[int, typer.Option(help="Engines of each way.", min=2)] = 4,
    seconds: Annotated[float, typer.Option(help="About how long requests arrive.", min=1)] = 300.0,
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Capacity per GPU of colocated, split and flexible engines, simulated."""
    known = {d.model: d for d in DEPLOYMENTS}
    names = deployments.split(",") if deployments else list(known)
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"unknown {unknown[0]!r}; known: {', '.join(known)}")
    rows: list[dict[str, Any]] = []
    for slo, name, dataset in itertools.product(SLOS, names, DATASETS):
        qps = engines * known[name].guesses[DATASETS.index(dataset)]
        num_requests = max(20, round(seconds * qps))
        for row in study(Case(known[name], dataset, slo, engines, num_requests, seed)):
            rows.append(row)
            console.print(" ".join(cells(row)), soft_wrap=True)
        publish(make_report(context, {"rows": rows}), False, out)  # what is done so far
    if as_json:
        publish(make_report(context, {"rows": rows}), True, None)
    else:
        title = f"{engines} engines; latencies in s at {COMPARED:.0%} of colocated capacity"
        output.print(table(title, COLUMNS, [cells(row) for row in rows], num_words=6))
