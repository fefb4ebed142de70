"""A load as the paper's artifact measures it, and the highest one that it lets pass.

Facts of github.com/microsoft/sarathi-serve, branch osdi-sarathi-serve, that differ from the paper's
text or from other experiments:

- its generator of requests: seed 42; a gap between arrivals is at most three means.
- `sarathi/benchmark`: a run ends after 30 minutes, and only requests that finished have a delay.
- `sarathi/core`, `sarathi/metrics`: the end of a prompt gives no token. A request has two gaps
  recorded as 0, at the end of its prompt and at its first token, and none between them.
- `sarathi/core/scheduler`: a step of Orca has any number of prompts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from actors.scheduling.cost.model import CostModel
from app.simulate.run.capacity import MEDIAN_DELAY_LIMIT_S
from app.simulate.run.record import RunRecord
from app.simulate.run.simulation import Deployment, SimulatedRun, scheduler_config, simulate
from app.simulate.workload.arrivals import Arrivals, poisson
from app.simulate.workload.requests import Workload, generate
from app.simulate.workload.specs import parse_lengths

SEED, MOST_MEAN_GAPS, TIME_LIMIT_S, MOST_REQUESTS = 42, 3.0, 1800.0, 2048
LONGEST = {"sharegpt4": 8192, "arxiv": 16384}
LATE_SHARE = 0.01
PLACES = 128


@dataclass(frozen=True, slots=True)
class Rules:
    """How a capacity is measured; by default as the other experiments do.

    own_arrivals: the artifact's. time_limit: of 30 minutes; otherwise `num_requests` are served.
    first_gap: whether the gap between the end of a prompt and the next token counts.
    """

    own_arrivals: bool = False
    time_limit: bool = False
    first_gap: bool = True
    num_requests: int = 384


@dataclass(frozen=True, slots=True)
class Case:
    """A deployment under one dataset and one objective, with what is changed about it.

    model: of both systems. orca_places, places: the most requests of Orca and Sarathi. wide: steps
    of Orca have any number of prompts. around: roughly the capacities of Orca and Sarathi, QPS.
    """

    model: CostModel
    dataset: str
    tbt_s: float
    token_budget: int
    orca_places: int
    around: tuple[float, float]
    wide: bool = False
    rules: Rules = Rules()
    places: int = PLACES


# ---- one load -------------------------------------------------------------------------


def own_arrivals(qps: float) -> Arrivals:
    """The artifact's: Poisson from its own seed, long gaps cut."""
    rng = random.Random(SEED)
    mean_s = 1.0 / qps
    return lambda n, _: np.cumsum(
        [min(rng.expovariate(qps), MOST_MEAN_GAPS * mean_s) for _ in range(n)]
    )


def traffic(case: Case, qps: float) -> Workload:
    """The requests of one load."""
    rules, lengths = case.rules, parse_lengths(case.dataset)
    num_requests = rules.num_requests
    if rules.time_limit:
        num_requests = min(MOST_REQUESTS, math.ceil(1.3 * qps * TIME_LIMIT_S) + 32)
    if rules.own_arrivals:
        workload = generate(own_arrivals(qps), lengths, num_requests)
    else:
        workload = generate(poisson(qps), lengths, num_requests).at_rate(qps)
    if not rules.first_gap:  # the end of a prompt gives no token: one more step
        workload = replace(workload, output_tokens=workload.output_tokens + 1)
    return workload


def passes(case: Case, policy: str, qps: float) -> bool:
    """Whether P99 TBT and the median scheduling delay are within their limits at a load."""
    workload = traffic(case, qps)
    most_late = LATE_SHARE * int(workload.output_tokens.sum())

    def hopeless(record: RunRecord, _: int) -> bool:
        gaps = np.array(record.gaps_s)
        return int((gaps > case.tbt_s).sum()) > most_late

    is_orca = policy == "orca"
    places = case.orca_places if is_orca else case.places
    config = scheduler_config(
        case.model,
        policy=policy,
        token_budget=case.token_budget,
        tbt_s=case.tbt_s,
        max_requests=places,
        max_step_tokens=places * LONGEST[case.dataset] if is_orca and case.wide else 16384,
    )
    run = simulate(
        workload,
        Deployment(config, case.model),
        keep_steps=not case.rules.first_gap,
        until_s=TIME_LIMIT_S if case.rules.time_limit else math.inf,
        should_stop=hopeless,
    )
    return (
        not hopeless(run.record, 0)
        and late_share(run, case.tbt_s, case.rules.first_gap) <= LATE_SHARE
        and median_delay_s(run) <= MEDIAN_DELAY_LIMIT_S
    )


def late_share(run: SimulatedRun, tbt_s: float, first_gap: bool) -> float:
    """Share of recorded gaps above the objective.

    first_gap: without it the first gap of each request counts as one of its two zeros.
    """
    gaps = np.frombuffer(run.record.gaps_s, np.float64)
    late = gaps > tbt_s * (1.0 + 1e-9)
    if first_gap or run.record.gap_owner is None:
        return float(late.mean())
    _, first = np.unique(np.frombuffer(run.record.gap_owner, np.int32), return_index=True)
    late[first] = False
    return float(late.sum()) / (len(late) + len(first))


def median_delay_s(run: SimulatedRun) -> float:
    """Median scheduling delay of the requests that finished; infinite if none did."""
    record = run.record
    finished = ~np.isnan(np.array(record.finished_s))
    delays = (np.array(record.started_s) - np.array(record.arrival_s))[finished]
    return float(np.median(delays)) if len(delays) else math.inf


# ---- capacity -------------------------------------------------------------------------


def bisect(
    value: Callable[[float], float], target: float, low: float, high: float, tolerance: float = 1e-4
) -> float:
    """Where a rising function reaches the target, to a relative tolerance; within [low, high]."""
    while high - low > tolerance * high:
        middle = (low + high) / 2
        low, high = (middle, high) if value(middle) < target else (low, middle)
    return (low + high) / 2


def highest_load(case: Case, policy: str) -> float:
    """The highest load that passes, to 3 %; raises ValueError if it is far from `case.around`."""
    around = case.around[policy == "sarathi"]
    low, high = 0.55 * around, 1.6 * around
    found = bisect(lambda qps: float(not passes(case, policy, qps)), 0.5, low, high, 0.03)
    if not 1.02 * low < found < 0.97 * high:
        raise ValueError(f"{case.model.name}: {policy} is not near {around} QPS")
    return found
