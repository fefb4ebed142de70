"""On submission and in the queue: what is refused, capped or held back."""

from __future__ import annotations

from typing import Any

import pytest

from actors.scheduling.build import build_core
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.cost.model import CostModel
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.events import Emit, Refuse, Submit
from actors.scheduling.interfaces import EngineView, RequestView
from actors.scheduling.request import Objective, Request, SamplingParams
from tests.actors.scheduling.driver import Driver
from tests.actors.scheduling.fake_stages import expected_output
from tests.actors.scheduling.short_lives import config, request


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        (request(1, tokens=(1,) * 64), "prompt"),
        (request(1, tokens=(1,) * 70, output=1), "prompt"),
        (request(1, output=0), "max_tokens"),
        (Request(1, (), SamplingParams(1), 0.0), "prompt"),
        (request(1, prompt=30, output=20), "max_tokens"),
        (request(1, prompt=50, output=1), "prompt"),
        (request(1, prompt=65, pooling="mean"), "prompt"),
    ],
)
def test_the_impossible_is_refused_at_once(wrong: Request, param: str) -> None:
    core = build_core(config(num_blocks=10))
    (refusal,) = core.handle(Submit(wrong), 0.0)
    assert isinstance(refusal, Refuse)
    assert refusal.param == param
    assert refusal.retry_after_s is None
    assert core.is_idle


def test_the_longest_possible_request_is_served() -> None:
    driver = Driver(config(num_blocks=16, watermark=0.3))
    driver.submit(request(1, prompt=60, output=100))
    driver.drain()
    assert len(driver.callers[1].tokens) == 4


def test_the_first_output_tells_how_long_a_request_waited() -> None:
    driver = Driver(config(max_requests=1))
    for number in (1, 2):
        driver.submit(request(number, output=3, arrival_s=0.0))
    driver.drain()
    told = [
        output.queued_s
        for _, _, instructions in driver.log
        for emitted in instructions
        if isinstance(emitted, Emit)
        for output in emitted.outputs
    ]
    # Events are 10 ms apart: the fifth is the answer that ends the first request.
    assert told == pytest.approx([0.01, 0, 0, 0.05, 0, 0])


def test_a_full_queue_refuses_for_a_while() -> None:
    driver = Driver(config(max_requests=1, max_queued_requests=2))
    for number in range(5):
        driver.submit(request(number))
    refused = {n: c.refused for n, c in driver.callers.items() if c.refused}
    assert set(refused) == {3, 4}
    assert all(refusal.retry_after_s for refusal in refused.values())
    driver.drain()
    driver.submit(request(9))
    driver.drain()
    driver.check_everyone_finished()


def test_queued_tokens_are_limited_but_one_always_fits() -> None:
    driver = Driver(config(max_requests=1, max_queued_tokens=20))
    driver.submit(request(1, prompt=5))
    driver.submit(request(2, prompt=50))  # alone in the queue
    driver.submit(request(3, prompt=5))
    assert driver.callers[2].refused is None
    refused = driver.callers[3].refused
    assert refused is not None
    assert "no room for this (scheduling.max_queued_tokens: 20)" in refused.message
    driver.drain()


@pytest.mark.parametrize(
    ("limit", "most"), [({"max_queued_requests": 2}, 2), ({"max_queued_tokens": 16}, 4)]
)
def test_the_background_fills_no_queue_of_live_requests(limit: dict[str, Any], most: int) -> None:
    driver = Driver(config(max_requests=2, num_blocks=200, **limit))
    for number in range(6):
        driver.submit(request(number, output=40, priority=-1, arrival_s=0.0))
    assert driver.callers[5].refused is not None
    for number in range(10, 16):
        driver.submit(request(number, output=40, arrival_s=0.0))
    refused = [number for number in range(10, 16) if driver.callers[number].refused]
    assert refused == list(range(10 + most, 16))
    driver.drain()


def test_tenants_have_caps() -> None:
    driver = Driver(config(max_running_per_tenant=1, max_queued_per_tenant=2))
    for number in range(6):
        driver.submit(request(number, tenant="greedy", output=8))
    driver.submit(request(7, tenant="modest", output=8))
    assert [n for n, c in driver.callers.items() if c.refused] == [3, 4, 5]
    driver.answer()
    running = {s.request_id for s in driver.core.requests.by_id.values() if s.block_table}
    assert running == {0, 7}
    driver.drain()
    driver.check_everyone_finished()


@pytest.mark.parametrize(
    "limit",
    [
        {"max_queued_requests": 2},
        {"max_queued_tokens": 8},
        {"max_queued_per_tenant": 2},
        {"admission": "predictive", "ttft_s": 0.5},
    ],
)
def test_what_was_accepted_before_is_not_refused_by_a_limit(limit: dict[str, Any]) -> None:
    """Before its engine was lost, or at the engine that it has left."""
    costs = CostModel("m", ((1, 0.1), (64, 0.2)), kv_tokens=60_000, max_model_len=64)
    settings = config(max_requests=1, **limit)
    driver = Driver(settings, build_core(settings, cost_model=OnlineCostModel(costs)))
    for number in range(20):
        driver.submit(request(number, arrival_s=0.0))
    assert driver.callers[19].refused is not None
    objective = Objective(tbt_s=0.01, ttft_s=0.01)
    done = tuple(expected_output(request(20), settings.max_model_len)[0][:1])
    driver.submit(request(20, done=done, arrival_s=0.0, objective=objective))
    driver.submit(request(21, arrival_s=0.0, is_replayed=True))
    driver.submit(request(22, prompt=80, arrival_s=0.0, is_replayed=True))  # of a longer context
    assert [driver.callers[n].refused is None for n in (20, 21, 22)] == [True, True, False]
    driver.drain()


@pytest.mark.parametrize(
    "limit",
    [
        {"max_queued_requests": 2},
        {"max_queued_tokens": 70},
        {"max_queued_per_tenant": 2},
        {"admission": "predictive", "ttft_s": 0.5},
    ],
)
def test_choices_are_accepted_with_the_first_whose_prompt_they_share(limit: dict[str, Any]) -> None:
    costs = CostModel("m", ((1, 0.1), (64, 0.2)), kv_tokens=60_000, max_model_len=128)
    settings = config(max_model_len=128, num_blocks=200, **limit)
    driver = Driver(settings, build_core(settings, cost_model=OnlineCostModel(costs)))
    for number in range(8):
        driver.submit(request(number, tokens=(1,) * 60, group="n", arrival_s=0.0))
    view = driver.core.view
    assert view.num_waiting_tokens - view.num_shared_tokens == 7  # their prompt counts once
    driver.abort(0)
    driver.answer()  # the next one computes the prompt
    assert view.num_waiting_tokens - view.num_shared_tokens == 6
    driver.drain()
    assert not [number for number in range(8) if driver.callers[number].refused]


class Picky:
    """Refuses odd ids; lets no request start beside another."""

    def on_submit(self, request: Request, engine: EngineView) -> Refuse | None:
        odd = request.request_id % 2
        return Refuse(request.request_id, "odd", None, engine.num_waiting + 1.0) if odd else None

    def may_start(self, request: RequestView, engine: EngineView) -> bool:
        return not (engine.decoding or engine.prefilling)


def test_admission_has_the_last_word_but_cannot_hang_the_engine() -> None:
    settings = config()
    driver = Driver(settings, build_core(settings, admission=Picky()))
    for number in range(6):
        driver.submit(request(number))
    assert [c.refused is not None for c in driver.callers.values()] == [False, True] * 3
    driver.drain()
    for plan in driver.plans:
        assert len(plan.slices) == 1


COSTS = CostModel("costs", tokens_s=((1, 0.010), (512, 0.2)))


def _refusal(objective: Objective, **config: Any) -> Refuse | None:
    core = build_core(SchedulerConfig(num_blocks=100, **config), cost_model=OnlineCostModel(COSTS))
    request = Request(1, (7,) * 300, SamplingParams(5), 0.0, objective=objective)
    refusals = [i for i in core.handle(Submit(request), 0.0) if isinstance(i, Refuse)]
    return refusals[0] if refusals else None


def test_an_objective_below_a_lone_decode_is_refused_by_name() -> None:
    refusal = _refusal(Objective(tbt_s=0.005))
    assert refusal is not None
    assert refusal.param == "slo.tbt_ms"
    assert refusal.retry_after_s is None
    assert "at least 10 ms" in refusal.message
    assert _refusal(Objective(tbt_s=0.02)) is None


def test_an_objective_below_the_operators_floor_is_refused() -> None:
    refusal = _refusal(Objective(tbt_s=0.04), min_tbt_s=0.05)
    assert refusal is not None
    assert "at least 50 ms" in refusal.message


def test_a_first_token_sooner_than_the_prompt_can_be_read_is_refused() -> None:
    refusal = _refusal(Objective(ttft_s=0.05), prefix_cache=False)
    assert refusal is not None
    assert refusal.param == "slo.ttft_ms"
    assert _refusal(Objective(ttft_s=1.0), prefix_cache=False) is None
    assert _refusal(Objective(ttft_s=0.05)) is None  # its prefix may be cached
    assert _refusal(Objective(ttft_s=0.001)) is not None
