"""Engines that die, leave or refuse, simulated: every token is there once, wherever it was made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actors.fleet.publish import Publisher
from actors.fleet.routers import ROUTERS
from actors.fleet.scaling import Bounds
from actors.fleet.snapshot import EngineSnapshot, short_digests
from actors.scheduling.cost.model import CostModel
from actors.scheduling.events import StepDone, Submit
from actors.scheduling.plan import StepResult
from actors.scheduling.request import Request, SamplingParams
from actors.scheduling.state import prefix_digests
from app.simulate.run.engine import BITS
from app.simulate.run.fleet import SimulatedFleet
from app.simulate.run.record import RunRecord
from app.simulate.run.simulation import Autoscale, Deployment, scheduler_config, simulate
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.lengths import fixed_lengths, uniform_lengths
from app.simulate.workload.requests import Workload, about_documents, concatenate, generate

MODEL = CostModel(
    "m", ((1, 0.010), (32, 0.010), (2048, 0.200)), decode_kv_s=1e-8, kv_tokens=60_000,
    max_model_len=4096,
)  # fmt: skip
CONFIG = scheduler_config(MODEL, token_budget=256, tbt_s=0.1)


@pytest.mark.parametrize("routing", ROUTERS)
def test_streams_of_a_dead_engine_go_on_elsewhere(routing: str) -> None:
    workload = generate(poisson(20.0), uniform_lengths(50, 1500, 4.0), 200)
    failures = ((4.0, 1), (6.0, 0))
    run = simulate(
        workload, Deployment(CONFIG, MODEL, num_replicas=4, routing=routing, failures=failures)
    )
    assert run.summary().num_completed == 200
    assert run.record.num_output_tokens == workload.output_tokens.tolist()
    moved = {request for _, request in run.moves}
    assert len(moved) > 4
    where = np.array(run.record.replica)
    assert set(where[list(moved)]) <= {2, 3, 0}
    assert not set(where[workload.arrival_s > 6.0]) & {0, 1}


@pytest.mark.heavy
def test_an_engine_that_joins_takes_over_what_is_late() -> None:
    """More requests are in time than without, and all tokens are there."""
    workload = generate(poisson(16.0), uniform_lengths(50, 1500, 4.0), 400)
    config = scheduler_config(MODEL, budget="adaptive", tbt_s=0.1, ttft_s=2.0)
    scale = Autoscale("slack", bounds=Bounds(1, 4), interval_s=2.0, start_s=4.0)
    in_time = []
    for rebalance in (False, True):
        run = simulate(
            workload,
            Deployment(config, MODEL, routing="slack", autoscale=scale, rebalance=rebalance),
        )
        assert run.summary().num_completed == 400
        assert run.record.num_output_tokens == workload.output_tokens.tolist()
        assert bool(run.moves) == rebalance
        wait_s = np.array(run.record.first_token_s) - np.array(run.record.arrival_s)
        in_time.append(int((wait_s <= 2.0).sum()))
    assert in_time[0] < in_time[1]


def test_a_fleet_that_is_all_dead_serves_when_an_engine_has_started() -> None:
    workload = generate(poisson(5.0), fixed_lengths(200, 20), 60)
    scale = Autoscale("slack", bounds=Bounds(1, 2), interval_s=1.0, start_s=5.0)
    run = simulate(
        workload, Deployment(CONFIG, MODEL, autoscale=scale, failures=((2.0, 0), (3.0, 7)))
    )
    assert run.summary().num_completed == 60
    first = np.array(run.record.first_token_s)
    lost = (workload.arrival_s > 2.0) & (workload.arrival_s < 7.0)
    assert lost.any()
    assert (first[lost] >= 7.0).all()


def test_what_waits_for_an_engine_keeps_its_place() -> None:
    """However often an engine that takes nothing tells how it is."""
    fleet = SimulatedFleet(Deployment(CONFIG, MODEL, num_replicas=2), RunRecord(5), 0, None)
    requests = [Request(n, (1,) * 100, SamplingParams(200), 0.0) for n in range(5)]
    fleet.submit(requests[0], 0.0)
    (busy,) = [engine for engine in fleet.engines.values() if engine.num_received]
    for engine in list(fleet.engines.values()):
        fleet.drain(engine, 1000.0, 0.0)
    for request in requests[1:]:
        fleet.submit(request, 0.0)
    for _ in range(12):
        fleet.timers.run_next()
        busy.changed = True
        assert [request.request_id for request, _ in fleet.queued] == [1, 2, 3, 4]
    fleet.start(fleet.timers.next_s)
    assert not fleet.queued


@pytest.mark.heavy
def test_a_leaving_engine_finishes_what_is_short_and_hands_over_the_rest() -> None:
    lengths = fixed_lengths(100, 400)
    busy, quiet = generate(poisson(8.0), lengths, 120), generate(poisson(0.5), lengths, 20)
    workload = concatenate([busy, quiet])
    for drain_s in (0.5, 1000.0):
        scale = Autoscale(
            "queue_length", {"target": 8.0, "upscale_delay_s": 0.0, "downscale_delay_s": 2.0},
            Bounds(1, 6), interval_s=1.0, start_s=1.0, drain_s=drain_s,
        )  # fmt: skip
        run = simulate(workload, Deployment(CONFIG, MODEL, routing="slack", autoscale=scale))
        assert max(wanted for _, wanted in run.scaling) >= 3
        assert run.scaling[-1][1] == 1
        assert run.record.num_output_tokens == workload.output_tokens.tolist()
        assert bool(run.moves) == (drain_s < 1.0)


@pytest.mark.heavy
def test_what_one_engine_refuses_all_others_are_asked_for() -> None:
    """Each of five holds two requests. Those of the last one are over when two more come, to the
    first one; a third finds no place."""
    output = np.array([*[2000] * 4, 1] * 2 + [2000] * 3)
    arrival_s = np.array([0.0] * 10 + [5.0] * 3)
    config = scheduler_config(
        MODEL, token_budget=512, prefix_cache=False, max_requests=1, max_queued_requests=1
    )
    workload = Workload(arrival_s, np.full(13, 100), output)
    run = simulate(workload, Deployment(config, MODEL, num_replicas=5))
    assert run.record.replica == [0, 1, 2, 3, 4] * 2 + [4, 4, run.record.replica[12]]
    summary = run.summary()
    assert (summary.num_completed, summary.num_refused) == (12, 1)


def test_changes_of_the_prefix_cache_follow_it() -> None:
    config = scheduler_config(MODEL, token_budget=256, tbt_s=0.1, prefix_cache=True)
    documents = about_documents(poisson(5.0), fixed_lengths(640, 8), 30, 120, seed=1)
    run = simulate(documents, Deployment(config, MODEL, num_replicas=2, routing="prefix"))
    cached = np.array(run.record.num_cached_tokens)
    again = np.array([s in documents.sessions[:i] for i, s in enumerate(documents.sessions)])
    assert (cached[again] == 640).mean() > 0.9
    assert (cached[~again] == 0).all()
    core = run.replicas[0].core
    publisher = Publisher("a", BITS, core)
    publisher.prefix_update()  # what the run's own has not taken yet
    assert publisher.prefix_update() is None
    before = publisher.prefixes()
    assert before.whole
    assert len(before.added) > 40
    tokens = tuple(range(5000, 5064))
    (execute,) = core.handle(Submit(Request(10**6, tokens, SamplingParams(1), 1e6)), 1e6)
    plan = execute.plan  # type: ignore[union-attr]
    core.handle(StepDone(StepResult(plan.step_id, ((10**6, 1),))), 1e6)
    update = publisher.prefix_update()
    assert update is not None
    assert set(update.added) == set(short_digests(prefix_digests(tokens, 16)))
    assert set(publisher.prefixes().added) == {*before.added, *update.added} - {*update.removed}


def test_a_drafter_is_left_out() -> None:
    """Without an acceptance: blank tokens are always guessed right."""
    traffic = generate(poisson(4.0), fixed_lengths(64, 40), 20, seed=2)
    base = scheduler_config(MODEL, token_budget=256)
    assert base.drafter == "none"
    without, drafting = (
        simulate(traffic, Deployment(replace(base, drafter=drafter), MODEL)).summary()
        for drafter in ("none", "lookup")
    )
    assert drafting == without


@pytest.mark.parametrize("qps", [0.2, 20.0])
def test_predictions_that_nobody_reads_are_not_made(
    qps: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is that of a front that has every snapshot made."""
    workload = generate(poisson(qps), uniform_lengths(50, 1500, 4.0), 60)
    deployment = Deployment(CONFIG, MODEL, num_replicas=3, routing="slack")
    made: list[float] = []
    snapshot = Publisher.snapshot

    def counted(publisher: Publisher, now_s: float, *rest: Any) -> EngineSnapshot:
        made.append(now_s)
        return snapshot(publisher, now_s, *rest)

    monkeypatch.setattr(Publisher, "snapshot", counted)
    few = simulate(workload, deployment)
    num_made = len(made)
    monkeypatch.setattr(SimulatedFleet, "_reads", lambda fleet, until_s: True)
    all_of_them = simulate(workload, deployment)
    assert few.record.gaps_s == all_of_them.record.gaps_s
    assert few.record.first_token_s == all_of_them.record.first_token_s
    assert few.record.replica == all_of_them.record.replica
    share = num_made / (len(made) - num_made)
    assert share < 0.6 if qps < 1.0 else 0.5 < share <= 1.0
