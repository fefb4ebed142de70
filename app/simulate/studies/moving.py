"""Streams that leave an engine: what they lose with their KV moved, and with it computed again.

    legato simulate --study moving [--seed 0] [--workers 2]

Four engines under 80 % of the load that they hold by `results/ways.md`. In `drain` one of them
leaves, as at a rolling update, under the strict objective. In `skew` the objective is tight, two
decode steps, and requests are dealt out in turn, so that one engine gets those with the longest
outputs; what is late there goes elsewhere (`fleet.rebalance`) but in `skew, not balanced`. KV is
computed again, or moves over an interconnect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product

import numpy as np

from actors.scheduling.build import build_core
from app.simulate.hardware.deployments import load_model
from app.simulate.hardware.interconnect import INTERCONNECTS, kv_bytes_per_token, shape_of
from app.simulate.run.deployment import Deployment, SharedKV
from app.simulate.run.processes import in_order
from app.simulate.run.simulation import scheduler_config, simulate
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.requests import Workload, generate
from app.simulate.workload.specs import parse_lengths

NUM_ENGINES = 4
LOAD = 0.8
# Event -> how KV moves; "": it is computed again
EVENTS: Mapping[str, tuple[str, ...]] = {
    "drain": ("", *INTERCONNECTS),
    "skew, not balanced": ("",),
    "skew": ("", "ethernet"),
}
# Requests/s that one GPU of colocated engines holds under the strict objective
CAPACITY_PER_GPU = {
    ("mistral-7b-a100", "sharegpt4"): 2.79,
    ("mistral-7b-a100", "arxiv"): 1.28,
    ("yi-34b-a100-tp2", "sharegpt4"): 0.684,
    ("yi-34b-a100-tp2", "arxiv"): 0.262,
}
WARM_S, WATCHED_S = 60.0, 20.0
TTFT_SEEN_S = 5.0  # requests that come later may not have begun at the end
TIGHT = 0.4  # of the strict objective


@dataclass(frozen=True, slots=True)
class MovingRow:
    """One run. link: "": KV is computed again. num_waiting: requests that left before they began.
    pauses: of the streams that moved; other gaps: those of all streams since the first one left.
    missed: of the streams that ran in the watched time, those with a gap longer than the objective.
    """

    model: str
    lengths: str
    event: str
    link: str
    objective_s: float
    num_waiting: int
    num_streams: int
    num_copied: int
    gigabytes: float
    recomputed_tokens: int
    pause_p50_s: float
    pause_max_s: float
    tbt_p99_s: float
    gap_max_s: float
    missed: float
    ttft_p99_s: float

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def run_one(
    model: str, lengths: str, event: str, link: str, seed: int, warm_s: float = WARM_S
) -> MovingRow:
    """Simulate one case."""
    cost = load_model(model)
    qps = (
        LOAD * NUM_ENGINES * CAPACITY_PER_GPU[model, lengths] * cost.tensor_ranks * cost.num_stages
    )
    drains, end_s = event == "drain", warm_s + WATCHED_S
    traffic = generate(poisson(qps), parse_lengths(lengths), int(qps * end_s), seed, lengths)
    shared = SharedKV(INTERCONNECTS[link], kv_bytes_per_token(shape_of(model))) if link else None
    strict = scheduler_config(cost, budget="adaptive", tbt_rule="strict", prefix_cache=True)
    tbt_s = build_core(strict).config.tbt_s
    assert tbt_s is not None
    tbt_s *= 1.0 if drains else TIGHT
    config = replace(strict, tbt_rule=None, tbt_s=tbt_s)
    run = simulate(
        traffic if drains else dealt_out(traffic),
        Deployment(
            config, cost, num_replicas=NUM_ENGINES, routing="slack" if drains else "round_robin",
            drains=((warm_s, 1),) if drains else (), rebalance=event == "skew", shared_kv=shared,
        ),
        seed=seed, until_s=end_s,
    )  # fmt: skip
    record, moved = run.record, run.moved
    gaps_s = np.array(record.gaps_s)[moved.num_gaps_before if moved else 0 :]
    last_s, arrival_s = np.array(record.last_token_s), np.array(record.arrival_s)
    wait_s = np.fmin(np.array(record.first_token_s), end_s) - arrival_s  # of those that have come
    came = arrival_s < end_s - TTFT_SEEN_S
    judged = last_s >= warm_s
    return MovingRow(
        model,
        lengths,
        event,
        link,
        tbt_s,
        len(run.moves) - (moved.num_streams if moved else 0),
        moved.num_streams if moved else 0,
        moved.num_copied if moved else 0,
        moved.num_bytes / 1e9 if moved else 0.0,
        moved.num_recomputed_tokens if moved else 0,
        float(np.median(moved.pauses_s)) if moved and len(moved.pauses_s) else 0.0,
        float(moved.pauses_s.max(initial=0.0)) if moved else 0.0,
        float(np.quantile(gaps_s, 0.99)),
        float(gaps_s.max()),
        float((np.array(record.max_gap_s)[judged] > tbt_s * (1 + 1e-9)).mean()),
        float(np.quantile(wait_s[came], 0.99)),
    )


def dealt_out(traffic: Workload) -> Workload:
    """The same requests, of which every fourth is one of those with the longest outputs."""
    order = np.argsort(-traffic.output_tokens, kind="stable")
    count = len(order) // NUM_ENGINES
    places = np.empty(count * NUM_ENGINES, int)
    rng = np.random.default_rng(0)
    places[0::NUM_ENGINES] = rng.permutation(order[:count])
    rest = rng.permutation(order[count : count * NUM_ENGINES])
    for engine in range(1, NUM_ENGINES):
        places[engine::NUM_ENGINES] = rest[(engine - 1) * count : engine * count]
    return Workload(
        traffic.arrival_s[: len(places)],
        traffic.prompt_tokens[places],
        traffic.output_tokens[places],
        name=f"{traffic.name}, dealt out",
    )


def study(seed: int = 0, workers: int = 1) -> Iterator[MovingRow]:
    """Every case, in order."""
    cases = [
        (*key, event, link, seed)
        for event, links in EVENTS.items()
        for key, link in product(CAPACITY_PER_GPU, links)
        if event == "drain" or key[1] == "sharegpt4"  # other outputs are short
    ]
    return in_order(run_one, cases, workers)


def as_markdown(rows: list[MovingRow]) -> str:
    """One table; times in ms."""
    lines = [
        "| deployment | lengths | event | KV | objective | requests | streams | copied | GB "
        "| tokens again | pause P50 | longest pause | TBT P99 | longest gap | missed | TTFT P99 |",
        "|---|---|---|---|" + "---:|" * 12,
    ]
    for row in rows:
        times_s = (row.pause_p50_s, row.pause_max_s, row.tbt_p99_s, row.gap_max_s)
        shown = " | ".join(f"{1e3 * time_s:,.0f}" for time_s in times_s)
        lines.append(
            f"| {row.model} | {row.lengths} | {row.event} | {row.link or 'again'} "
            f"| {1e3 * row.objective_s:.0f} | {row.num_waiting} | {row.num_streams} "
            f"| {row.num_copied} | {row.gigabytes:.1f} | {row.recomputed_tokens:,} | {shown} "
            f"| {row.missed:.1%} | {1e3 * row.ttft_p99_s:,.0f} |"
        )
    return "\n".join(lines) + "\n"
