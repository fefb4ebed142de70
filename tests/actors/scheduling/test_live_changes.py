"""Settings changed while requests run: no request is lost, and nonsense is refused whole."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from actors.scheduling.build import build_core
from actors.scheduling.config import ConfigError
from actors.scheduling.cost.model import CostModel
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.events import Reconfigure
from actors.scheduling.live_changes import merged
from actors.scheduling.policies import POLICIES
from actors.scheduling.validation import validate
from tests.actors.scheduling.driver import Driver
from tests.actors.scheduling.modeled import modeled
from tests.actors.scheduling.short_lives import config, request


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_live_switch_loses_no_request(policy: str) -> None:
    driver = Driver(config(lookahead=True, num_blocks=16))
    for number in range(10):
        driver.submit(request(number, prompt=5 + number, output=12, tenant="ab"[number % 2]))
    for _ in range(5):
        driver.answer()
    driver.send(Reconfigure({"scheduling.policy": policy, "scheduling.token_budget": 5}))
    for _ in range(5):
        driver.answer()
    driver.send(Reconfigure({"policy": "sarathi", "slo.tbt_ms": 50, "slo.ttft_ms": None}))
    assert driver.core.config.tbt_s == 0.05
    driver.drain()
    driver.check_everyone_finished()


@pytest.mark.parametrize(
    "changes",
    [
        {"scheduling.policy": "nonsense"},
        {"num_blocks": 1},
        {"policy": "vllm", "policy_options": {"nonsense": 1}},
        {"policy_options": {"chunks": "nonsense"}},
        {"order": "nonsense"},
        {"token_budget": "many"},
        {"token_budget": True},
        {"token_budget": 65},  # the stages' buffers hold 64 tokens
        {"watermark": None},
        {"max_chunk": "long"},
        {"tbt_ms": "soon"},
        {"tbt_ms": 0},
        {"policy_options": ["chunks"]},
        {"max_requests": 9},  # the stages were built for 8
        {"budget": "nonsense"},
        {"budget": "fixed", "budget_options": {"nonsense": 1}},
        {"admission": "nonsense"},
        {"order_options": {"nonsense": 1}},
    ],
)
def test_a_bad_change_is_refused_whole(changes: dict[str, Any]) -> None:
    core = build_core(config())
    before = core.config, core.policy
    with pytest.raises(ConfigError) as caught:
        core.handle(Reconfigure(changes), 0.0)
    assert caught.value.key in {key.removeprefix("scheduling.") for key in changes}
    assert (core.config, core.policy) == before
    validate(core)


def test_places_may_be_lowered_and_raised_again_but_not_beyond_what_was_built() -> None:
    driver = Driver(config(max_requests=4))
    for number in range(12):
        driver.submit(request(number, output=6))
    driver.answer()
    assert driver.core.requests.running.num_requests == 4
    driver.send(Reconfigure({"scheduling.max_requests": 1}))
    assert driver.core.requests.running.num_requests == 4  # none is thrown out
    while driver.core.requests.running.num_requests > 1:
        driver.answer()
    for _ in range(3):
        driver.answer()
        assert driver.core.requests.running.num_requests <= 1
    for too_many in (5, 1000):
        with pytest.raises(ConfigError, match="max_requests: the stages were built for 4"):
            driver.core.handle(Reconfigure({"max_requests": too_many}), driver.now_s)
    driver.send(Reconfigure({"max_requests": 4}))
    driver.answer()
    assert driver.core.requests.running.num_requests == 4
    driver.drain()
    driver.check_everyone_finished()


def test_options_belong_to_the_part_they_were_written_for() -> None:
    core = build_core(config(policy="mlfq", order_options={"quantum_tokens": 4}))
    core.handle(Reconfigure({"policy": "orca", "policy_options": {"max_batch": 2}}), 0.0)
    assert core.config.order_options == {}
    core.handle(Reconfigure({"policy": "fair"}), 0.1)
    assert core.config.policy_options == {}


_CHANGES: tuple[dict[str, Any], ...] = (
    {"token_budget": 256},
    {"budget": "adaptive"},
    {"scheduling.budget": "fixed", "token_budget": 128},
    {"budget_options": {"percentile": 90}},
    {"policy": "orca"},
    {"policy": "sarathi", "order": "auto"},
    {"order": "fair", "order_options": {"ttft_weight": 2}},
    {"order_options": {}},
    {"slo.tbt_ms": 50},
    {"tbt_ms": None, "admission": "predictive"},
)


@pytest.mark.parametrize("order", ["auto", "fair"])
def test_several_changes_merged_into_one_do_the_same(order: str) -> None:
    """Whatever an engine accepts one after the other, one that starts later accepts at once."""
    options = {"order_options": {"a": 1}, "budget_options": {"b": 2}}
    started = config(order=order, **options).with_changes({})
    chance = random.Random(5)
    more = (chance.choices(_CHANGES, k=5) for _ in range(500))
    for changes in itertools.chain(itertools.product(_CHANGES, repeat=3), more):
        running, one = started, dict[str, Any]()
        for change in changes:
            try:
                running = running.with_changes(change)
            except ConfigError:  # as of tokens for a budget that has none
                continue
            one = merged(one, change, started.order)
        assert started.with_changes(one) == running, changes


def test_what_lacked_memory_starts_once_a_change_gives_it() -> None:
    driver = Driver(config(num_blocks=40, max_model_len=160, watermark=0.9))
    driver.submit(request(0, prompt=20, output=100, arrival_s=0.0))
    for _ in range(3):
        driver.answer()
    driver.submit(request(1, prompt=20, output=4, arrival_s=driver.now_s))
    for _ in range(3):
        driver.answer()
    assert driver.callers[1].first is None
    driver.send(Reconfigure({"watermark": 0.0}))
    for _ in range(5):
        driver.answer()
    assert driver.callers[1].first is not None
    driver.drain()


def test_another_ttft_objective_undoes_no_order_that_knows_none() -> None:
    options = {"quantum_tokens": 4}
    driver = Driver(
        config(
            policy="mlfq", max_requests=4, num_blocks=400, max_model_len=600,
            order_options=options,
        )
    )  # fmt: skip
    for number in range(4):
        driver.submit(request(number, prompt=8, output=500, arrival_s=driver.now_s))
    for _ in range(60):
        driver.answer()
    levels = [state.level for state in driver.core.live_requests.values()]
    assert min(levels) > 0
    driver.send(Reconfigure({"slo.ttft_ms": 700}))
    assert [state.level for state in driver.core.live_requests.values()] == levels


def test_a_refused_change_of_the_budget_leaves_the_cost_model_as_it_was() -> None:
    model = CostModel("m", ((1, 0.010), (2048, 0.200)), kv_tokens=10_000, max_model_len=4096)
    driver = Driver(modeled(model, token_budget=64, tbt_s=0.1))
    driver.submit(request(1, output=8))
    core = driver.core
    assert isinstance(core.cost_model, OnlineCostModel)
    for option in ("admission", "order"):
        changes = {"budget": "auto", "token_budget": None, f"{option}_options": {"unheard_of": 1}}
        with pytest.raises(ConfigError):
            core.handle(Reconfigure(changes), driver.now_s)
        driver.answer()
        assert not core.cost_model.stands_in
    driver.send(Reconfigure({"budget": "auto", "token_budget": None}))
    driver.answer()
    assert core.cost_model.stands_in
    driver.drain()
