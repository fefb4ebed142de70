"""Replicas: routing spreads, autoscaling follows the load, sessions find their prefix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from actors.fleet.routers import ROUTERS
from actors.fleet.scaling import Bounds
from actors.scheduling.config import ConfigError
from actors.scheduling.cost.model import CostModel
from actors.scheduling.validation import validate
from app.simulate.hardware.interconnect import INTERCONNECTS
from app.simulate.run.capacity import search_capacity
from app.simulate.run.deployment import Division, SharedKV
from app.simulate.run.simulation import Autoscale, Deployment, scheduler_config, simulate
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.lengths import fixed_lengths, uniform_lengths
from app.simulate.workload.requests import concatenate, generate, multi_turn
from app.simulate.workload.specs import TrafficSpec

pytestmark = pytest.mark.heavy

MODEL = CostModel(
    "m", ((1, 0.010), (32, 0.010), (2048, 0.200)), decode_kv_s=1e-8, kv_tokens=60_000,
    max_model_len=4096,
)  # fmt: skip
CONFIG = scheduler_config(MODEL, token_budget=256, tbt_s=0.1)


@pytest.mark.parametrize("routing", ROUTERS)
def test_every_request_is_served_once_whatever_the_routing(routing: str) -> None:
    workload = generate(poisson(20.0), uniform_lengths(50, 1500, 8.0), 300)
    result = simulate(workload, Deployment(CONFIG, MODEL, num_replicas=4, routing=routing))
    assert result.summary().num_completed == 300
    assert result.record.num_output_tokens == workload.output_tokens.tolist()
    served = np.bincount(result.record.replica, minlength=4)
    assert (served > 30).all()
    for replica in result.replicas:
        validate(replica.core)
        assert replica.core.is_idle


def test_looking_before_routing_beats_taking_turns() -> None:
    workload = generate(poisson(26.0), uniform_lengths(50, 3000, 8.0), 600)
    delay = {
        routing: simulate(
            workload, Deployment(CONFIG, MODEL, num_replicas=4, routing=routing)
        ).summary().ttft_p99
        for routing in ("round_robin", "slack")
    }  # fmt: skip
    assert delay["slack"] < delay["round_robin"]


def test_replicas_multiply_capacity() -> None:
    found = [
        search_capacity(
            Deployment(CONFIG, MODEL, num_replicas=n, routing="least_loaded"),
            TrafficSpec("fixed:400,40", num_requests=250 * n).read(),
            0.1, guess_qps=8.0, tolerance=0.05,
        ).qps
        for n in (1, 2)
    ]  # fmt: skip
    assert found[1] == pytest.approx(2 * found[0], rel=0.15)


@pytest.mark.parametrize(
    ("scaling", "options"),
    [
        ("queue_length", {"target": 12, "upscale_delay_s": 5, "downscale_delay_s": 20}),
        ("slack", {"ahead_s": 10, "smoothing_s": 10, "calm_s": 20}),
    ],
)
def test_autoscaling_follows_the_load_up_and_down(scaling: str, options: dict[str, Any]) -> None:
    lengths = fixed_lengths(400, 40)
    quiet, busy = (generate(poisson(q), lengths, n) for q, n in ((1.0, 60), (25.0, 1500)))
    policy = Autoscale(scaling, options, Bounds(1, 8), interval_s=5, start_s=10)
    result = simulate(
        concatenate([quiet, busy, quiet]), Deployment(CONFIG, MODEL, autoscale=policy)
    )
    wanted = [n for _, n in result.scaling]
    assert wanted[0] == 1
    assert max(wanted) >= 3
    assert wanted[-1] == 1
    assert result.summary().num_completed == 60 + 1500 + 60
    span_s = result.record.end_s
    assert span_s < result.replica_seconds < 0.8 * max(wanted) * span_s


def test_conversations_find_their_prefix_in_the_cache() -> None:
    chats = multi_turn(1.0, 5.0, fixed_lengths(120, 40), 40, think_s=5.0)
    roomy = CostModel.from_dict({**MODEL.to_dict(), "kv_tokens": 400_000})
    config = scheduler_config(roomy, token_budget=256, prefix_cache=True)
    result = simulate(chats, Deployment(config, roomy))
    cached = np.array(result.record.num_cached_tokens)
    later = chats.shared_tokens > 0
    assert later.any()
    # Everything said before is found, but for the last partial block; unless an impatient user
    # speaks before the answer is complete.
    found = cached[later] > chats.shared_tokens[later] - 2 * config.block_size
    assert found.mean() > 0.8
    assert (cached[~later] == 0).all()


def test_conversations_of_a_model_with_states_go_where_these_are() -> None:
    chats = multi_turn(1.0, 5.0, fixed_lengths(120, 40), 40, think_s=5.0)
    roomy = CostModel.from_dict({**MODEL.to_dict(), "kv_tokens": 400_000, "state_tokens": 500})
    config = scheduler_config(roomy, token_budget=256, tbt_s=0.1, prefix_cache=True)
    assert (config.num_saved_states, config.num_blocks) == (128, (400_000 - 128 * 500) // 16)
    found = {}
    for routing in ("slack", "round_robin"):
        result = simulate(chats, Deployment(config, roomy, num_replicas=4, routing=routing))
        cached = np.array(result.record.num_cached_tokens)
        found[routing] = cached.sum() / chats.shared_tokens.sum()
    assert found["slack"] > found["round_robin"] + 0.2


def test_memory_is_divided_as_the_engine_that_was_measured_divided_it() -> None:
    """One with few blocks beside the states: a cap on these, or `kv.memory_gib`."""
    kept = {**MODEL.to_dict(), "kv_tokens": 1600 + 20 * 500, "state_tokens": 500}
    measured = CostModel.from_dict({**kept, "num_states": 20})

    def sizes(model: CostModel, asked: int) -> tuple[int, int]:
        config = scheduler_config(model, max_requests=asked)
        return config.max_requests, config.num_blocks

    assert sizes(measured, 20) == sizes(measured, 128) == (20, 100)
    assert sizes(measured, 12) == (12, 100 + 8 * 500 // 16)
    assert sizes(CostModel.from_dict(kept), 20) == (11, (1600 + 9 * 500) // 16)


def test_what_kv_alone_would_have_to_do_is_refused_where_layers_keep_states() -> None:
    model = CostModel.from_dict({**MODEL.to_dict(), "state_tokens": 500})
    config = scheduler_config(model, prefix_cache=True)
    drafting = scheduler_config(model, drafter="auto")
    with pytest.raises(ValueError, match=r"^acceptance: layers of this model keep states"):
        Deployment(drafting, model, acceptance=0.5)
    shared = SharedKV(INTERCONNECTS["nvlink"], 1e5)
    with pytest.raises(ValueError, match=r"^shared_kv: layers"):
        Deployment(config, model, num_replicas=2, rebalance=True, shared_kv=shared)
    with pytest.raises(ValueError, match=r"^division: layers"):
        Deployment(
            scheduler_config(model), model, num_replicas=2,
            division=Division("split", 1, INTERCONNECTS["nvlink"], 1e5),
        )  # fmt: skip
    with pytest.raises(ValueError, match="no KV fits beside the states"):
        scheduler_config(CostModel.from_dict({**model.to_dict(), "kv_tokens": 500}))


def test_capacity_is_bracketed_and_says_what_broke() -> None:
    traffic = TrafficSpec("fixed:400,40", num_requests=200).read()
    found = search_capacity(Deployment(CONFIG, MODEL), traffic, 0.1, guess_qps=1.0)
    passed = [p.qps for p in found.probes if p.passed]
    failed = [p.qps for p in found.probes if not p.passed]
    assert found.qps == max(passed) < min(failed) <= found.qps / 0.97
    assert found.limit == "scheduling delay"
    strict = search_capacity(
        Deployment(scheduler_config(MODEL, policy="orca"), MODEL),
        TrafficSpec("fixed:1500,40", num_requests=200).read(), 0.05, guess_qps=1.0,
    )  # fmt: skip
    assert strict.limit == "P99 TBT"


def test_wrong_names_are_refused() -> None:
    workload = generate(poisson(1.0), fixed_lengths(5, 5), 2)
    with pytest.raises(ConfigError, match="known: least_loaded"):
        simulate(workload, Deployment(CONFIG, MODEL, routing="x"))
    with pytest.raises(ConfigError, match="known: queue_length"):
        simulate(workload, Deployment(CONFIG, MODEL, autoscale=Autoscale("weather")))
    with pytest.raises(TypeError, match="least <= most"):
        Bounds(3, 2)
