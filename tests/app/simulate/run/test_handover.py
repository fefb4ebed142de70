"""Engines with roles: each token once, KV moved beside the steps, and no block left behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from actors.fleet.snapshot import Role
from actors.scheduling.cost.model import CostModel
from actors.scheduling.validation import validate
from app.simulate.hardware.interconnect import Interconnect
from app.simulate.run.deployment import Division
from app.simulate.run.divided import DividedFleet
from app.simulate.run.fleet import SimulatedFleet
from app.simulate.run.record import RunRecord
from app.simulate.run.simulation import (
    Autoscale,
    Deployment,
    SimulatedRun,
    scheduler_config,
    simulate,
)
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.lengths import uniform_lengths
from app.simulate.workload.requests import Workload, generate, multi_turn

pytestmark = pytest.mark.heavy

# A step takes 10 ms plus 1 ms a token; nothing else costs anything.
PLAIN = CostModel("plain", ((1, 0.011), (1000, 1.010)), kv_tokens=16_000, max_model_len=8192)
FAST = CostModel(
    "fast", ((1, 0.010), (32, 0.010), (2048, 0.200)), decode_kv_s=1e-8, kv_tokens=60_000,
    max_model_len=4096,
)  # fmt: skip
TOKEN_BYTES = 1e6
WIRE = Interconnect("wire", 1e9, 0.005)


def divided(
    model: CostModel,
    way: str = "split",
    num_prefill: int = 1,
    num_decode: int = 1,
    link: Interconnect = WIRE,
    tbt_s: float | None = 0.1,
    **changes: object,
) -> Deployment:
    changes = {"budget": "adaptive", "tbt_s": tbt_s, **changes}
    config = scheduler_config(model, **changes)  # type: ignore[arg-type]
    division = Division(way, num_prefill, link, TOKEN_BYTES)
    num_engines = num_prefill + num_decode
    return Deployment(config, model, num_replicas=num_engines, routing="slack", division=division)


def workload(*rows: tuple[float, int, int]) -> Workload:
    arrivals, prompts, outputs = zip(*rows, strict=True)
    return Workload(np.array(arrivals, float), np.array(prompts), np.array(outputs))


def bytes_of(run: SimulatedRun) -> float:
    assert run.handovers is not None
    return run.handovers.num_bytes


def test_times_that_can_be_worked_out_by_hand() -> None:
    run = simulate(workload((0.0, 100, 4)), divided(PLAIN))
    record = run.record
    # 100 tokens: 110 ms and the first token. Six full blocks, 96 tokens: 96 ms and 5 ms on the way.
    assert record.first_token_s[0] == pytest.approx(0.110)
    assert bytes_of(run) == 96 * TOKEN_BYTES
    assert record.handover_s[0] == pytest.approx(0.101)
    # The four tokens behind the last full block and the first sampled one: 15 ms; then 11 ms each.
    assert list(record.gaps_s) == pytest.approx([0.116, 0.011, 0.011])
    assert record.num_starts == [1]
    assert run.summary().scheduling_delay_p50 == pytest.approx(0.101)


def test_what_has_no_full_block_and_what_ends_at_once_moves_nothing() -> None:
    run = simulate(workload((0.0, 15, 3), (1.0, 500, 1)), divided(PLAIN))
    assert bytes_of(run) == 0.0
    assert run.record.num_output_tokens == [3, 1]
    assert run.handovers is not None
    assert run.handovers.num_requests == 1
    assert list(run.record.gaps_s) == pytest.approx([0.005 + 0.026, 0.011])


def sharing(deployment: Deployment) -> Deployment:
    assert deployment.division is not None
    return replace(deployment, division=replace(deployment.division, shares_prefixes=True))


def test_what_the_second_engine_has_of_a_conversation_does_not_move() -> None:
    turns = Workload(
        np.array([0.0, 5.0]), np.array([160, 240]), np.array([33, 3]),
        np.array([0, 0]), np.array([0, 193]),
    )  # fmt: skip
    apart = simulate(turns, divided(PLAIN))
    assert bytes_of(apart) == (160 + 240) * TOKEN_BYTES
    run = simulate(turns, sharing(divided(PLAIN)))
    # The first engine still has the first prompt. The second one has the answer too, 12 full blocks
    # of 192 tokens, and lacks three.
    assert run.record.first_token_s[1] == pytest.approx(5.010 + 0.080)
    assert bytes_of(run) == (160 + 48) * TOKEN_BYTES
    assert run.record.handover_s[1] == pytest.approx(0.048 + 0.005)


@pytest.mark.parametrize("way", ["split", "flexible", "colocated"])
def test_conversations_lose_no_token_and_leave_no_block(way: str) -> None:
    turns = multi_turn(1.5, 4.0, uniform_lengths(100, 600, 2.0), 60, 2.0, 3000, seed=2)
    small = replace(FAST, kv_tokens=12_000)  # what was told is often forgotten
    num_prefill = 0 if way == "colocated" else 1
    deployment = sharing(divided(small, way, num_prefill, 3 - num_prefill))
    run = simulate(turns, deployment)
    assert run.record.num_output_tokens == turns.output_tokens.tolist()
    for replica in run.replicas:
        validate(replica.core)
        assert (
            replica.core.requests.running.block_manager.num_free == replica.core.config.num_blocks
        )


def test_chunks_move_while_the_prompt_is_read() -> None:
    """Eleven chunks of 512 tokens, one of 304 and the last one of 64. What is waited for is that
    and what of the one before is still on its way."""
    run = simulate(workload((0.0, 6000, 2)), divided(PLAIN, link=Interconnect("wire", 2e9, 0.005)))
    assert run.record.first_token_s[0] == pytest.approx(6.13)
    assert run.record.handover_s[0] == pytest.approx((304 + 64) / 2000 - 0.074 + 0.005)
    assert bytes_of(run) == 6000 * TOKEN_BYTES


def test_kv_moves_with_the_first_token_where_it_does_not_move_ahead() -> None:
    behind = divided(PLAIN)
    assert behind.division is not None
    behind = replace(behind, division=replace(behind.division, ahead=False))
    for num_tokens in (100, 6000):  # in one chunk and in thirteen
        run = simulate(workload((0.0, num_tokens, 3)), behind)
        num_bytes = num_tokens // 16 * 16 * TOKEN_BYTES
        assert bytes_of(run) == num_bytes
        assert run.record.handover_s[0] == pytest.approx(num_bytes / WIRE.bytes_per_s + 0.005)


def test_engines_have_the_live_settings_of_their_role() -> None:
    division = divided(PLAIN).division
    assert division is not None
    config = divided(PLAIN).config
    cached = replace(config, prefix_cache=True)
    assert division.config_of(Role.PREFILL, config) == cached.handing_over()
    assert division.config_of(Role.BOTH, config) == cached
    alike = replace(division, num_prefill=0, shares_prefixes=True)
    for states in (replace(config, num_saved_states=0), replace(cached, num_saved_states=8)):
        with_states = alike.config_of(Role.BOTH, states)
        assert with_states == replace(cached, num_saved_states=config.max_requests)
        without = replace(alike, shares_prefixes=False).config_of(Role.BOTH, with_states)
        assert without == replace(config, num_saved_states=0)


def test_a_link_takes_its_transfers_in_turn() -> None:
    """Two prompts: the second moves after the first, on the link of either end. Its last 64 tokens
    are a step of their own, of 74 ms, so that its first token comes so much later."""
    both = workload((0.0, 10, 1), (0.001, 160, 2), (0.001, 160, 2))
    for engines in ((1, 1), (1, 2)):
        run = simulate(both, divided(PLAIN, "split", *engines))
        first, second = sorted(run.record.handover_s[1:])
        assert first == pytest.approx(0.165)
        assert second == pytest.approx(0.325 - 0.074)


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token of a run is missing or repeated."""
    emitted = RunRecord.emitted

    def checked(record: RunRecord, rows: Sequence[tuple[int, ...]], now_s: float) -> int:
        for row in rows:
            assert row[1] == record.num_output_tokens[row[0]], "a token is missing or repeated"
        return emitted(record, rows, now_s)

    monkeypatch.setattr(RunRecord, "emitted", checked)


def check_all_ended(run: SimulatedRun, traffic: Workload) -> None:
    """With all their tokens, and no block is left."""
    num_requests = len(traffic.output_tokens)
    assert run.summary().num_completed == num_requests
    assert run.record.num_output_tokens == traffic.output_tokens.tolist()
    assert len(run.record.gaps_s) == int(traffic.output_tokens.sum()) - num_requests
    for replica in run.replicas:
        assert replica.num_live == 0
        assert replica.core.is_idle
        validate(replica.core)
        assert replica.core.view.num_free_blocks == replica.core.view.num_blocks


@pytest.mark.parametrize("way", ["colocated", "split", "flexible"])
@pytest.mark.parametrize("kv_tokens", [60_000, 5_000])
def test_no_token_is_lost_or_doubled_and_no_block_is_left(
    way: str, kv_tokens: int, in_order: None
) -> None:
    traffic = generate(poisson(12.0), uniform_lengths(50, 1500, 4.0), 60)
    model = replace(FAST, kv_tokens=kv_tokens)
    numbers = (0, 4) if way == "colocated" else (2, 2)
    run = simulate(traffic, divided(model, way, *numbers))
    check_all_ended(run, traffic)
    if way == "split":
        full = traffic.prompt_tokens // 16 * 16
        assert bytes_of(run) == float(full[traffic.output_tokens > 1].sum()) * TOKEN_BYTES
        prefilled = [replica.core.num_prefilled_tokens for replica in run.replicas]
        assert sum(prefilled[:2]) == int(traffic.prompt_tokens.sum())
    if kv_tokens == 60_000:
        assert run.summary().num_preemptions == 0


def test_flexible_engines_without_prefill_engines_are_colocated() -> None:
    traffic = generate(poisson(12.0), uniform_lengths(50, 1500, 4.0), 80)
    runs = [
        simulate(traffic, divided(FAST, way, 0, 3), keep_steps=True)
        for way in ("colocated", "flexible")
    ]
    assert runs[0].record.first_token_s == runs[1].record.first_token_s
    assert runs[0].record.gaps_s == runs[1].record.gaps_s
    assert bytes_of(runs[1]) == 0.0


def test_flexible_engines_with_infinite_slack_move_nothing_until_prompts_queue() -> None:
    """Without an objective, prompts that come one by one are computed where they decode."""
    traffic = workload(*[(3.0 * i, 400, 10) for i in range(20)])
    free = divided(FAST, "flexible", 1, 2, tbt_s=None, budget="fixed", token_budget=2048)
    run = simulate(traffic, free)
    assert bytes_of(run) == 0.0
    strict = simulate(traffic, divided(FAST, "flexible", 1, 2, tbt_s=0.0105))
    assert bytes_of(strict) == 20 * 400 * TOKEN_BYTES


@pytest.mark.parametrize("way", ["split", "flexible"])
def test_snapshots_are_made_while_a_second_engine_is_sought(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrivals are rare: without it the choice would rest on what engines were long ago."""
    traffic = generate(poisson(0.5), uniform_lengths(1500, 3000, 4.0), 10)
    few = simulate(traffic, divided(FAST, way, 1, 2))
    monkeypatch.setattr(SimulatedFleet, "_reads", lambda fleet, until_s: True)
    monkeypatch.setattr(DividedFleet, "_reads", lambda fleet, until_s: True)
    all_of_them = simulate(traffic, divided(FAST, way, 1, 2))
    assert few.record.replica == all_of_them.record.replica
    assert few.record.gaps_s == all_of_them.record.gaps_s


def test_a_slow_link_delays_streams_and_no_step() -> None:
    """Prefill and decode steps go on beside the transfers; only what moves waits."""
    traffic = generate(poisson(4.0), uniform_lengths(200, 1000, 4.0), 60)
    quick = simulate(traffic, divided(FAST, link=Interconnect("quick", 1e12, 0.0)))
    slow = simulate(traffic, divided(FAST, link=Interconnect("slow", 2.5e9, 0.01)))
    assert slow.record.first_token_s == quick.record.first_token_s
    assert slow.handovers is not None
    assert quick.handovers is not None
    assert slow.handovers.handover_s.min() > 0.01
    assert slow.handovers.busiest_link > 0.5 > 0.01 > quick.handovers.busiest_link
    assert slow.summary().tbt_p50 == pytest.approx(quick.summary().tbt_p50, rel=0.2)


def test_what_roles_do_not_take_is_refused_by_name() -> None:
    plain = divided(FAST)
    with pytest.raises(ValueError, match="failures"):
        replace(plain, failures=((1.0, 0),))
    with pytest.raises(ValueError, match="autoscale"):
        replace(plain, autoscale=Autoscale())
    with pytest.raises(ValueError, match="prefix_cache"):
        replace(plain, config=replace(plain.config, prefix_cache=True))
