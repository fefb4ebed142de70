"""Streams that take their KV along: every token once, few of them computed again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actors.scheduling.validation import validate
from app.simulate.hardware.interconnect import Interconnect
from app.simulate.run.deployment import Deployment, SharedKV
from app.simulate.run.simulation import SimulatedRun, scheduler_config, simulate
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.lengths import fixed_lengths, uniform_lengths
from app.simulate.workload.requests import Workload, generate
from tests.app.simulate.run.test_handover import FAST, TOKEN_BYTES, workload
from tests.app.simulate.run.test_handover import in_order as in_order

pytestmark = pytest.mark.heavy

QUICK = Interconnect("quick", 1e11, 0.001)


def fleet(num_engines: int, link: Interconnect | None = QUICK, **changes: Any) -> Deployment:
    config = scheduler_config(FAST, budget="adaptive", tbt_s=0.1, prefix_cache=True)
    shared = SharedKV(link, TOKEN_BYTES) if link else None
    return Deployment(
        config, FAST, num_replicas=num_engines, routing="slack", shared_kv=shared, **changes
    )


def check_all_ended(run: SimulatedRun, traffic: Workload) -> None:
    """With all their tokens, and engines that stay hold no block. One that has gone may have been
    in a step, whose result nobody wanted."""
    assert run.record.num_output_tokens == traffic.output_tokens.tolist()
    assert run.summary().num_completed == len(traffic)
    for replica in run.replicas:
        validate(replica.core)
        if replica.core.is_idle:
            assert replica.core.view.num_free_blocks == replica.core.view.num_blocks
    assert run.replicas[-1].core.is_idle


def test_one_stream_moves_behind_its_kv() -> None:
    """It pauses for a step, which computes what it lacks, where it would compute all of it."""
    traffic = workload((0.0, 1000, 900))
    pauses_s, again = [], []
    for link in (None, QUICK):
        run = simulate(traffic, fleet(2, link, drains=((1.0, 0),)))
        check_all_ended(run, traffic)
        assert run.moved is not None
        assert run.moved.num_streams == 1
        pauses_s.append(float(run.moved.pauses_s[0]))
        again.append(run.moved.num_recomputed_tokens)
        assert run.record.replica[0] == 1
    assert again[0] > 1000
    assert again[1] <= 2
    assert pauses_s[1] < 0.03 < 0.1 < pauses_s[0]
    assert run.moved.num_copied == 1
    # The blocks of its prompt, and those that it had completed before it moved.
    assert run.moved.num_bytes % (16 * TOKEN_BYTES) == 0.0
    assert 62 < run.moved.num_bytes / (16 * TOKEN_BYTES) < 80


@pytest.mark.parametrize("kv_tokens", [60_000, 8_000])
def test_an_engine_leaves_and_no_token_is_lost(
    kv_tokens: int, in_order: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.simulate.run.fleet.FINISHES_WITHIN_S", 0.2)
    traffic = generate(poisson(12.0), uniform_lengths(50, 1500, 4.0), 200)
    runs = []
    for link in (None, QUICK):
        plain = fleet(3, link, drains=((6.0, 1), (9.0, 0)))
        model = replace(FAST, kv_tokens=kv_tokens)
        config = replace(plain.config, num_blocks=kv_tokens // 16)
        run = simulate(traffic, replace(plain, model=model, config=config))
        check_all_ended(run, traffic)
        runs.append(run)
    again, with_kv = (run.moved for run in runs)
    assert again is not None
    assert with_kv is not None
    assert again.num_streams > 5
    assert len(with_kv.pauses_s) == with_kv.num_streams
    assert with_kv.num_recomputed_tokens < again.num_recomputed_tokens


@pytest.mark.parametrize("other", [0, 1])
def test_either_end_may_die_while_kv_is_copied(other: int, in_order: None) -> None:
    slow = Interconnect("slow", 1.5e9, 0.001)  # a second or more for each
    traffic = workload(*[(0.01 * i, 1500, 600) for i in range(6)])
    run = simulate(traffic, fleet(3, slow, drains=((1.5, 0),), failures=((1.9, other),)))
    check_all_ended(run, traffic)
    assert run.moved is not None
    assert run.moved.num_recomputed_tokens > 0


def test_over_a_slow_link_it_is_computed_again(in_order: None) -> None:
    """By the cost model of the core: what is fetched takes longer."""
    traffic = generate(poisson(4.0), fixed_lengths(1000, 900), 20)
    run = simulate(traffic, fleet(2, Interconnect("slow", 1e8, 0.01), drains=((3.0, 0),)))
    check_all_ended(run, traffic)
    assert run.moved is not None
    assert run.moved.num_recomputed_tokens > 1000


def test_an_engine_that_misses_its_objective_is_relieved(
    in_order: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However fast it is, the first one has a stream too many."""

    def num_excess(engine: Any) -> int:
        return int(engine.engine_id == "engine-0")

    monkeypatch.setattr("actors.fleet.balance._num_excess", num_excess)
    traffic = generate(poisson(6.0), uniform_lengths(50, 1500, 1.0), 120)
    run = simulate(traffic, fleet(2, QUICK, rebalance=True))
    check_all_ended(run, traffic)
    assert run.moved is not None
    assert run.moved.num_copied == run.moved.num_streams > 3
    moved = {request for _, request in run.moves}
    assert set(np.array(run.record.replica)[list(moved)]) == {1}


def test_what_does_not_act_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="shared_kv has no effect"):
        fleet(2)
    plain = fleet(2, rebalance=True)
    with pytest.raises(ValueError, match="prefix_cache"):
        replace(plain, config=replace(plain.config, prefix_cache=False))
