"""Capacities as the paper's artifact measures them: one of its rules at a time, then all.

The rules are those of github.com/microsoft/sarathi-serve, branch osdi-sarathi-serve, which differ
from the paper's text or from the simulator:

- `sarathi/benchmark/request_generator`: seed 42; a gap between arrivals is at most three means.
- `sarathi/benchmark`: a run ends after 30 minutes, and only requests that finished have a delay.
- `sarathi/core`, `sarathi/metrics`: the end of a prompt gives no token. A request has two gaps
  recorded as 0, at the end of its prompt and at its first token, and none between them.
- `sarathi/core`: a step of Orca has any number of prompts. A request of Orca holds KV for the
  longest sequence, in 85 % of the memory less the weights and the activations of such a step.
- `sarathi/model_executor`: Mistral-7B attends to all positions.

`misses` prints the rows with its own experiments.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from actors.scheduling.cost.model import CostModel
from app.simulate.hardware.deployments import load_model
from app.simulate.hardware.shapes import DEVICES, MODELS
from app.simulate.paper import published
from app.simulate.paper.published import PaperDeployment, PublishedRow
from app.simulate.paper.steps import chunked_s
from app.simulate.run.record import RunRecord
from app.simulate.run.simulation import Deployment, SimulatedRun, scheduler_config, simulate
from app.simulate.studies.missed_capacities import attention_factor
from app.simulate.workload.arrivals import Arrivals, poisson
from app.simulate.workload.requests import Workload, generate
from app.simulate.workload.specs import parse_lengths

SEED, MOST_MEAN_GAPS, TIME_LIMIT_S, MOST_REQUESTS = 42, 3.0, 1800.0, 2048
MEMORY_SHARE = 0.85
LONGEST = {"sharegpt4": 8192, "arxiv": 16384}
AROUND = {  # capacities of Orca and Sarathi under the strict objective, QPS
    ("mistral-7b-a100", "sharegpt4"): (0.95, 2.7),
    ("mistral-7b-a100", "arxiv"): (0.45, 1.1),
    ("yi-34b-a100-tp2", "sharegpt4"): (0.28, 1.15),
    ("yi-34b-a100-tp2", "arxiv"): (0.17, 0.39),
    ("llama2-70b-a40-tp4-pp2", "sharegpt4"): (0.125, 0.81),
    ("llama2-70b-a40-tp4-pp2", "arxiv"): (0.07, 0.29),
    ("falcon-180b-a100-tp4-pp2", "sharegpt4"): (0.13, 0.79),
    ("falcon-180b-a100-tp4-pp2", "arxiv"): (0.07, 0.28),
}
DELAY_LIMIT_S, LATE_SHARE = 2.0, 0.01


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

    model: of both systems. orca_places: the most requests of Orca. wide: steps of Orca have any
    number of prompts. around: roughly the capacities of Orca and Sarathi, QPS.
    """

    model: CostModel
    dataset: str
    tbt_s: float
    token_budget: int
    orca_places: int
    around: tuple[float, float]
    wide: bool = False
    rules: Rules = Rules()

    @property
    def over_orca(self) -> tuple[float, float]:
        """Capacities of Orca and Sarathi, QPS."""
        return highest_load(self, "orca"), highest_load(self, "sarathi")


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
    places = case.orca_places if is_orca else 128
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
        and median_delay_s(run) <= DELAY_LIMIT_S
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


# ---- what is changed ------------------------------------------------------------------


def orca_places(d: PaperDeployment, dataset: str) -> int:
    """Requests that the artifact's Orca has KV for, up to its batch cap.

    Activations: the hidden states twice, the projections up and their product, at two bytes.
    """
    model = load_model(d.model)
    shape = MODELS[d.model.split("-a")[0]]
    device = DEVICES["a40" if "a40" in d.model else "a100"]
    ranks, gpus = model.tensor_ranks, model.tensor_ranks * model.num_stages
    inner = (3 if shape.gated else 2) * shape.intermediate / ranks
    tokens = d.orca_batch * LONGEST[dataset]
    activation_bytes = 2.0 * tokens * (2 * shape.hidden + inner)
    left = MEMORY_SHARE * device.memory_bytes - shape.weight_bytes / gpus - activation_bytes
    kv_bytes = LONGEST[dataset] * shape.kv_bytes_per_token / gpus
    return min(d.orca_batch, int(left / kv_bytes))


@functools.cache
def measured_prefill() -> tuple[float, float]:
    """Factors of attention and of KV read by chunks that give two measurements of the artifact.

    The first: 16384 tokens in one step. The second: 8191 tokens in steps of 512.
    """
    model, pairs = load_model("yi-34b-a100-tp2"), attention_factor()
    target_s = published.CHUNKING_MS[8191][512] / 1e3

    def seconds(factor: float) -> float:
        return chunked_s(_prefill_scaled(model, pairs, factor), 8191, 512)

    return pairs, bisect(seconds, target_s, 1.0, 1000.0)


def _prefill_scaled(model: CostModel, pairs: float, kv: float) -> CostModel:
    return replace(
        model,
        prefill_pair_s=pairs * model.prefill_pair_s,
        prefill_square_s=pairs * model.prefill_square_s,
        prefill_kv_s=kv * model.prefill_kv_s,
    )


def all_rules(d: PaperDeployment, dataset: str) -> Case:
    """The strict objective as the artifact measures it."""
    model = _prefill_scaled(load_model(d.model), *measured_prefill())
    return replace(
        _plain(d, dataset),
        model=replace(model, attention_window=0),
        orca_places=orca_places(d, dataset),
        wide=True,
        rules=Rules(own_arrivals=True, time_limit=True, first_gap=False),
    )


def cases(d: PaperDeployment, dataset: str) -> Iterator[tuple[str, Case]]:
    """The strict objective under each rule, then under all of them."""
    plain = _plain(d, dataset)
    model, places = plain.model, orca_places(d, dataset)
    yield "the artifact's arrivals", replace(plain, rules=Rules(own_arrivals=True))
    yield "30 minutes", replace(plain, rules=Rules(time_limit=True))
    if model.num_stages == 1:  # elsewhere it is not P99 TBT that stops Orca
        yield "first gap not counted", replace(plain, rules=Rules(first_gap=False))
    yield f"orca with {places} places, any prompts", replace(plain, wide=True, orca_places=places)
    if model.attention_window:
        yield "no sliding window", replace(plain, model=replace(model, attention_window=0))
    measured = _prefill_scaled(model, *measured_prefill())
    yield "prefill as measured", replace(plain, model=measured)
    yield "all of these", all_rules(d, dataset)


def _plain(d: PaperDeployment, dataset: str) -> Case:
    model, around = load_model(d.model), AROUND[d.model, dataset]
    return Case(model, dataset, d.strict_s, d.budgets[0], d.orca_batch, around)


# ---- rows -----------------------------------------------------------------------------


def rule_rows() -> Iterator[PublishedRow]:
    """Capacities over Orca: rule by rule where they are missed, all rules everywhere."""
    for d in published.DEPLOYMENTS:
        missed = "sharegpt4" if load_model(d.model).num_stages > 1 else "arxiv"
        for name, case in cases(d, missed):
            yield from _rows(d, missed, name, case)
        (other,) = set(published.DATASETS) - {missed}
        yield from _rows(d, other, "all of these", all_rules(d, other))


def _rows(d: PaperDeployment, dataset: str, name: str, case: Case) -> Iterator[PublishedRow]:
    orca, sarathi = case.over_orca
    figure = "Figure 10" if case.model.num_stages == 1 else "Figure 11"
    where = f"{d.label}, {dataset}, strict, {name}"
    yield PublishedRow(figure, where, "orca capacity, QPS", orca)
    yield PublishedRow(figure, where, "sarathi capacity, QPS", sarathi)
    stated = published.OVER_ORCA[d.model][dataset][0]
    yield PublishedRow(figure, where, "sarathi / orca", sarathi / orca, stated)
