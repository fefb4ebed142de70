"""A quote says what is achievable and what is not, with and without a cost model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from actors.scheduling.build import build_core
from actors.scheduling.core import Core
from actors.scheduling.cost.model import CostModel
from actors.scheduling.events import Refuse, Submit
from actors.scheduling.interfaces import QuoteRequest
from actors.scheduling.request import Objective, Request, SamplingParams
from tests.actors.scheduling.driver import Driver
from tests.actors.scheduling.modeled import modeled

MODEL = CostModel(
    "m", ((1, 0.010), (32, 0.010), (2048, 0.200)), decode_kv_s=2e-8, kv_tokens=60_000,
    max_model_len=4096,
)  # fmt: skip
SETTINGS: dict[str, Any] = {"tbt_s": 0.06, "ttft_s": 2.0, "max_requests": 64}
USUAL = QuoteRequest(800, 60)


def core_of(**changes: Any) -> Core:
    return build_core(modeled(MODEL, **{"budget": "adaptive", **SETTINGS, **changes}))


def test_what_cannot_be_had_is_told_with_what_can() -> None:
    idle = core_of()
    now = idle.quote(USUAL, 0.0)
    assert now.can_serve_now is True
    assert now.message is now.retry_after_s is None
    for objective, param in (((0.001, None), "slo.tbt_ms"), ((None, 0.05), "slo.ttft_ms")):
        never = idle.quote(QuoteRequest(800, 60, Objective(*objective)), 0.0)
        assert (never.can_serve_now, never.retry_after_s, never.param) == (False, None, param)
        assert never.message is not None
        assert "is not achievable" in never.message
    assert now.least_tbt_s is not None
    assert now.least_ttft_s is not None
    objective = Objective(1.001 * now.least_tbt_s, 1.001 * now.least_ttft_s)
    best = idle.quote(QuoteRequest(800, 60, objective), 0.0)
    assert best.can_serve_now is True
    assert idle.quote(QuoteRequest(5000, 60), 0.0).param == "prompt"


def test_a_constant_budget_is_judged_by_its_own_steps() -> None:
    """Steps of 1024 tokens take longer than the objective whatever runs, of 256 they do not."""
    never = core_of(budget="fixed", token_budget=1024).quote(USUAL, 0.0)
    assert (never.can_serve_now, never.param, never.retry_after_s) == (False, "slo.tbt_ms", None)
    assert core_of(budget="fixed", token_budget=256).quote(USUAL, 0.0).can_serve_now is True


def test_without_a_cost_model_nothing_is_predicted() -> None:
    config = replace(modeled(MODEL), cost_model=None, max_queued_requests=1)
    core = build_core(config)
    unknown = core.quote(USUAL, 0.0)
    assert unknown.can_serve_now is None
    assert unknown.ttft_s is unknown.least_ttft_s is None
    assert "cost model" in str(unknown.message)
    # Limits that need no prediction are told all the same.
    for number in range(200):
        told = core.handle(Submit(Request(number, (1,) * 8, SamplingParams(60), 0.0)), 0.0)
        if any(isinstance(instruction, Refuse) for instruction in told):
            break
    full = core.quote(USUAL, 0.0)
    assert full.can_serve_now is False
    assert full.retry_after_s is not None


def test_a_quote_of_low_priority_leaves_half_of_the_objectives() -> None:
    core, background = core_of(tbt_s=0.03), replace(USUAL, priority=-1)
    driver = Driver(core.config, core)
    bounds_s: list[float] = []
    for number in range(60):
        driver.submit(Request(number, (1,) * 8, SamplingParams(600), driver.now_s))
        while core.view.prefilling or core.view.num_waiting:
            driver.answer()
        quote = core.quote(background, driver.now_s)
        bounds_s.append(quote.tbt_bound_s or 0.0)
        if not quote.can_serve_now:
            break
    assert (quote.can_serve_now, quote.param) == (False, "slo.tbt_ms")
    assert len(bounds_s) > 1
    assert bounds_s[-2] <= 0.015 < bounds_s[-1], "half of the objective"
    assert core.quote(USUAL, driver.now_s).can_serve_now is True
    driver.drain()
    assert core.quote(background, driver.now_s).can_serve_now is True


def test_a_slow_moment_makes_no_objective_unachievable() -> None:
    """Steps take half as long again for 0.6 s; a lone decode usually takes 10 ms."""
    core = core_of()
    driver = Driver(core.config, core)
    driver.submit(Request(1, (1,) * 8, SamplingParams(2000), 0.0))
    for _ in range(300):
        driver.answer()
    tight = QuoteRequest(800, 60, Objective(0.0115, 0.1))
    before = core.quote(tight, driver.now_s)
    for _ in range(40):
        driver.now_s += 0.005
        driver.answer()
    slow = core.quote(tight, driver.now_s)
    assert slow.ttft_s is not None
    assert before.ttft_s is not None
    assert slow.ttft_s > 1.2 * before.ttft_s
    for name in ("least_ttft_s", "least_tbt_s"):
        assert getattr(slow, name) < 1.1 * getattr(before, name), name
    driver.submit(Request(2, (1,) * 8, SamplingParams(5), driver.now_s, objective=tight.objective))
    assert driver.callers[2].refused is None


def test_beside_the_background_alone_any_objective_is_judged() -> None:
    """Also one between the time on an idle engine and that behind a step of the background."""
    core = core_of()
    for number in range(4):
        background = Request(number, (number,) * 3000, SamplingParams(60), 0.0, priority=-1)
        core.handle(Submit(background), 0.0)
    free = core.quote(USUAL, 0.0)
    assert free.ttft_s is not None
    assert free.least_ttft_s is not None
    assert free.least_ttft_s < free.ttft_s
    between = Objective(None, (free.least_ttft_s + free.ttft_s) / 2)
    late = core.quote(replace(USUAL, objective=between), 0.0)
    assert (late.can_serve_now, late.param) == (False, "slo.ttft_ms")
    assert late.retry_after_s is not None
    assert 0.0 < late.retry_after_s < 1.0


def test_background_requests_hold_up_no_live_one() -> None:
    core = core_of(tbt_s=0.03, ttft_s=2.0, admission="predictive", budget="adaptive")
    driver = Driver(core.config, core)
    hour = Objective(3600.0, 3600.0)
    for number in range(100):
        sampling = SamplingParams(600)
        driver.submit(
            Request(number, (1,) * 800, sampling, driver.now_s, priority=-1000, objective=hour)
        )
    driver.answer()
    quotes = [core.quote(replace(USUAL, priority=p), driver.now_s) for p in (0, -1000)]
    assert quotes[0].can_serve_now
    bounds_s = [quote.ttft_bound_s or 0.0 for quote in quotes]
    assert 0.0 < 4 * bounds_s[0] < bounds_s[1]
    driver.submit(Request(999, (1,) * 800, SamplingParams(5), driver.now_s))
    assert driver.callers[999].refused is None
