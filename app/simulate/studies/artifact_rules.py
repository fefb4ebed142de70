"""Capacities over Orca under the rules of the paper's artifact: one at a time, then all.

Beside those of `artifact_load`, of the same branch:

- its block managers and models: a request of Orca holds KV for the longest sequence, in 85 % of
  the memory less the weights and the activations of its largest step.
- its models: Mistral-7B attends to all positions.
- its configuration: the most requests are those of one iteration, so that a pipeline holds as many
  in each micro-batch. (The released scheduler counts all; the paper's larger chunks then gain
  nothing.)

`misses` prints the rows with its own experiments.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

from actors.scheduling.cost.model import CostModel
from app.simulate.hardware.deployments import load_model
from app.simulate.hardware.shapes import DEVICES, MODELS
from app.simulate.paper import published
from app.simulate.paper.costs import decodes
from app.simulate.paper.published import PaperDeployment, PublishedRow
from app.simulate.paper.steps import chunked_s
from app.simulate.studies.artifact_load import (
    LONGEST,
    PLACES,
    Case,
    Rules,
    bisect,
    highest_load,
)
from app.simulate.studies.missed_capacities import attention_factor

MEMORY_SHARE = 0.85
AROUND = {  # capacities of Orca and Sarathi, QPS
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


def with_own_overheads(case: Case) -> Case:
    """With the time of a step and of a request that no operator of the artifact's decode steps
    accounts for (Yi-34B)."""
    yi = load_model("yi-34b-a100-tp2-artifact")
    model = replace(case.model, overhead_s=yi.overhead_s, per_request_s=yi.per_request_s)
    orca, sarathi = case.around
    return replace(case, model=model, around=(0.85 * orca, 0.75 * sarathi))


def all_rules(d: PaperDeployment, dataset: str, slo: str = "strict") -> Case:
    """An objective as the artifact measures it."""
    case = all_but_overheads(d, dataset, slo)
    # The paper's decode steps on one stage (a fifth of the objective) have no room for them.
    return with_own_overheads(case) if case.model.num_stages > 1 else case


def all_but_overheads(d: PaperDeployment, dataset: str, slo: str = "strict") -> Case:
    """Every rule but the time of a step and of a request."""
    case = _plain(d, dataset, slo)
    model = replace(_prefill_scaled(case.model, *measured_prefill()), attention_window=0)
    return replace(
        case,
        model=model,
        orca_places=orca_places(d, dataset),
        wide=True,
        rules=Rules(own_arrivals=True, time_limit=True, first_gap=False),
        places=PLACES * model.num_stages,
    )


def cases(d: PaperDeployment, dataset: str) -> Iterator[tuple[str, Case]]:
    """The strict objective under each rule."""
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
    if model.num_stages > 1:
        yield "overheads as measured", with_own_overheads(plain)
        yield "128 requests a micro-batch", replace(plain, places=PLACES * model.num_stages)


def chunk_cases(d: PaperDeployment) -> Iterator[tuple[str, Case]]:
    """The relaxed objective's larger chunks with few and many requests in the pipeline."""
    case = all_rules(d, "sharegpt4", "relaxed")
    yield "all, 128 requests in the pipeline", replace(case, places=PLACES)
    case = all_but_overheads(d, "sharegpt4", "relaxed")
    yield "all but overheads", case
    yield "all but overheads, 128 requests in the pipeline", replace(case, places=PLACES)


def _plain(d: PaperDeployment, dataset: str, slo: str = "strict") -> Case:
    model, around = load_model(d.model), AROUND[d.model, dataset]
    budget = d.budgets[published.SLOS.index(slo)]
    return Case(model, dataset, d.slo_s(slo), budget, d.orca_batch, around)


# ---- rows -----------------------------------------------------------------------------


def rule_rows() -> Iterator[PublishedRow]:
    """Capacities over Orca: rule by rule for one deployment of one stage and one of two, in the
    dataset that is missed; all rules for every deployment and dataset."""
    mistral, _, llama, _ = published.DEPLOYMENTS
    for d, dataset in ((mistral, "arxiv"), (llama, "sharegpt4")):
        for name, case in cases(d, dataset):
            yield from _rows(d, dataset, name, case)
    for d in published.DEPLOYMENTS:
        slow = with_own_overheads(_plain(d, "sharegpt4")).model
        step_s = slow.latency_s(decodes(slow, 32, 4096))
        where, quantity = f"{d.label}, overheads as measured", "step of 32 decodes at 4k, s"
        yield PublishedRow("Table 3", where, quantity, step_s, d.strict_s / 5.0)
    for name, case in chunk_cases(llama):
        yield from _rows(llama, "sharegpt4", name, case, "relaxed")
    for d in published.DEPLOYMENTS:
        for dataset in published.DATASETS:
            yield from _rows(d, dataset, "all of these", all_rules(d, dataset))
        if load_model(d.model).num_stages > 1:  # where relaxed ratios deviate the other way
            case = all_rules(d, "sharegpt4", "relaxed")
            yield from _rows(d, "sharegpt4", "all of these", case, "relaxed")


def _rows(
    d: PaperDeployment, dataset: str, name: str, case: Case, slo: str = "strict"
) -> Iterator[PublishedRow]:
    orca, sarathi = (highest_load(case, policy) for policy in ("orca", "sarathi"))
    figure = "Figure 10" if case.model.num_stages == 1 else "Figure 11"
    where = f"{d.label}, {dataset}, {slo}, {name}"
    index = published.SLOS.index(slo)
    loads = published.LOADS_QPS.get((d.model, dataset), (None, None))[index]
    stated_orca, stated_sarathi = loads or (None, None)
    yield PublishedRow(figure, where, "orca capacity, QPS", orca, stated_orca)
    yield PublishedRow(figure, where, "sarathi capacity, QPS", sarathi, stated_sarathi)
    stated = published.OVER_ORCA[d.model][dataset][index]
    yield PublishedRow(figure, where, "sarathi / orca", sarathi / orca, stated)
