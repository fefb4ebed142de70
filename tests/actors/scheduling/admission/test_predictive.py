"""Which admission a config gets, and how the predictive one learns from its predictions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from actors.scheduling.admission import build_admission
from actors.scheduling.admission.peak import PredictedPeak
from actors.scheduling.admission.predictive import CAUTION, WATCHED, Correction, PredictiveAdmission
from actors.scheduling.build import build_core
from actors.scheduling.config import ConfigError, SchedulerConfig
from actors.scheduling.core import Core
from actors.scheduling.cost.model import CostModel
from actors.scheduling.events import MayReturn, Reconfigure, Refuse, Submit, TurnedAway
from actors.scheduling.request import Objective, Request, SamplingParams
from tests.actors.scheduling.driver import Driver
from tests.actors.scheduling.modeled import modeled


def test_bad_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="known: all, predicted_peak, predictive"):
        build_admission(SchedulerConfig(num_blocks=8, admission="maybe"), None)
    with pytest.raises(ConfigError, match="cost model"):
        build_admission(SchedulerConfig(num_blocks=8, admission="predictive"), None)
    options = {"reserve": 0.1, "speed": 1}
    with pytest.raises(ConfigError, match="speed"):
        build_admission(
            SchedulerConfig(num_blocks=8, admission="predicted_peak", admission_options=options),
            None,
        )
    built = build_admission(SchedulerConfig(num_blocks=8, admission="predicted_peak"), None)
    assert isinstance(built, PredictedPeak)


@pytest.mark.parametrize(
    ("budget", "step_tokens"),
    [
        ({"budget": "auto"}, None),
        ({"budget": "auto", "token_budget": 64}, 64),
        ({"budget": "auto", "budget_options": {"tokens": 96}}, 96),
        ({"budget": "fixed", "token_budget": 80}, 80),
        ({"budget": "throttled", "budget_options": {"most": 128}}, 128),
        ({"budget": "adaptive"}, None),
    ],
    ids=str,
)
def test_steps_are_predicted_of_the_budget_s_size(
    budget: dict[str, Any], step_tokens: int | None
) -> None:
    """At startup, and after a change while running."""
    model = CostModel("m", ((1, 0.01), (2048, 0.2)), kv_tokens=60_000, max_model_len=4096)
    settings: dict[str, Any] = {"admission": "predictive", "tbt_s": 0.06, "ttft_s": 2.0}
    other = "fixed" if step_tokens is None else "adaptive"
    fresh = build_core(modeled(model, **settings, **budget))
    changed = build_core(modeled(model, **settings, budget=other))
    changed.handle(Reconfigure(budget), 0.0)
    for core in (fresh, changed):
        admission = core.limits.admission
        assert isinstance(admission, PredictiveAdmission)
        assert admission.predictor.step_tokens == step_tokens


def test_a_correction_is_the_quantile_of_what_became_of_recent_predictions() -> None:
    correction = Correction(share=0.9)
    assert correction.factor() == CAUTION  # this queue has not been watched
    assert correction.factor(unevenness=1.4) == 1.4
    for percent in range(100):
        correction.observe(actual_s=1.0 + percent / 100, predicted_s=1.0)
    assert correction.factor(unevenness=2.0) == pytest.approx(1.89)
    for _ in range(WATCHED):
        correction.observe(0.5, 1.0)
    assert correction.factor() == pytest.approx(0.5)  # what was is forgotten


@pytest.mark.parametrize(("read_s", "is_refused"), [(0.0, False), (0.3, False), (1.5, True)])
def test_the_time_to_read_a_request_counts(read_s: float, is_refused: bool) -> None:
    """Ten prompts wait, of about 0.1 s each, and 2 s are allowed from a request's arrival."""
    model = CostModel("m", ((1, 0.01), (2048, 0.2)), kv_tokens=60_000, max_model_len=4096)
    core = build_core(modeled(model, admission="predictive", ttft_s=2.0, max_requests=64))
    for number in range(10):
        core.handle(Submit(Request(number, (number,) * 1000, SamplingParams(5), 9.0)), 9.0)
    late = Request(99, (9,) * 100, SamplingParams(5), 9.0 - read_s)
    moved = Request(98, (9,) * 100, SamplingParams(5), 0.0, output=(1,))  # has its first token
    assert not [i for i in core.handle(Submit(moved), 9.0) if isinstance(i, Refuse)]
    refused = [i for i in core.handle(Submit(late), 9.0) if isinstance(i, Refuse)]
    assert [r.request_id for r in refused] == [99] * is_refused


def flooded() -> Core:
    """Ten prompts wait, of about 0.1 s each, where the first token may take 1 s."""
    model = CostModel("m", ((1, 0.01), (2048, 0.2)), kv_tokens=60_000, max_model_len=4096)
    core = build_core(modeled(model, admission="predictive", ttft_s=1.0, max_requests=64))
    for number in range(10):
        core.handle(Submit(Request(number, (number,) * 1000, SamplingParams(5), 9.0)), 9.0)
    return core


def submit(core: Core, number: int, num_tokens: int, now_s: float) -> Refuse | None:
    request = Request(number, (number,) * num_tokens, SamplingParams(5), now_s)
    refused = [i for i in core.handle(Submit(request), now_s) if isinstance(i, Refuse)]
    return refused[0] if refused else None


def test_a_refusal_holds_for_longer_prompts_as_long_as_it_says() -> None:
    core = flooded()
    first = submit(core, 50, 400, 9.0)
    assert first is not None
    assert first.retry_after_s is not None
    assert 0.0 < first.closed_s < first.retry_after_s
    for number, num_tokens in enumerate((400, 500, 3000)):
        assert submit(core, 60 + number, num_tokens, 9.0 + 0.9 * first.closed_s) is not None


def test_an_engine_without_a_queue_closes_for_nobody() -> None:
    """A longer prompt may be accepted: where waiting would not help."""
    model = CostModel("m", ((1, 0.01), (2048, 0.2)), kv_tokens=60_000, max_model_len=4096)
    core = build_core(modeled(model, admission="predictive", ttft_s=0.1, max_requests=64))
    assert submit(core, 0, 16, 9.0) is None
    for number in range(1, 64):
        refusal = submit(core, number, 600, 9.0)
        if refusal is not None:
            break
    assert refusal is not None
    assert refusal.closed_s == 0.0 or core.view.num_waiting or core.view.prefilling


def test_what_a_replica_has_turned_away_delays_later_retries_as_if_refused_here() -> None:
    here, there = flooded(), flooded()
    first = submit(here, 50, 1000, 9.0)
    assert first == submit(there, 50, 1000, 9.0)
    assert first is not None
    assert first.each_s > 0.0
    second = submit(here, 51, 1000, 9.0)
    assert second is not None
    assert second.retry_after_s is not None
    key = MayReturn.key_of("", (51,) * 1000)
    there.handle(TurnedAway((MayReturn(key, second.each_s, second.retry_after_s),)), 9.0)
    assert submit(here, 52, 1000, 9.0) == submit(there, 52, 1000, 9.0)


def test_nothing_is_learned_from_what_is_held_back_for_others() -> None:
    model = CostModel("m", ((1, 0.01), (2048, 0.2)), kv_tokens=60_000, max_model_len=4096)
    core = build_core(modeled(model, admission="predictive", ttft_s=2.0))
    admission = core.limits.admission
    assert isinstance(admission, PredictiveAdmission)
    for number, priority in enumerate((0, -1, 0, -1000)):
        request = Request(number, (1,) * 8, SamplingParams(5), 0.0, priority=priority)
        core.handle(Submit(request), 0.0)
    assert set(admission._predicted) == {0, 2}


def test_a_request_waits_for_its_tenant_s_cap_and_returns_once_that_has_room() -> None:
    model = CostModel("m", ((1, 0.01), (2048, 0.2)), kv_tokens=60_000, max_model_len=4096)
    settings: dict[str, Any] = {"admission": "predictive", "tbt_s": 0.1, "ttft_s": 1.0}
    driver = Driver(
        modeled(model, **settings, token_budget=64, max_running_per_tenant=1, max_requests=8)
    )

    def submit(number: int, tenant: str) -> Refuse | None:
        asked = Request(number, (7,) * 20, SamplingParams(400), driver.now_s, tenant=tenant)
        driver.submit(asked)
        return driver.callers[number].refused

    assert submit(1, "capped") is None
    for _ in range(10):
        driver.answer()
    refusal = submit(2, "capped")
    assert refusal is not None
    assert refusal.retry_after_s is not None
    assert submit(3, "another") is None
    ended_s = 0.0
    begin_s = driver.now_s
    while driver.callers[1].finish is None:
        driver.answer()
        ended_s = driver.now_s - begin_s
    assert 0.8 * ended_s < refusal.retry_after_s < 2.5 * ended_s
    assert submit(4, "capped") is None
    driver.drain()


def test_of_a_tenant_at_its_cap_the_next_that_return_each_wait_for_one_more_to_end() -> None:
    model = CostModel("m", ((1, 0.01), (2048, 0.2)), kv_tokens=60_000, max_model_len=4096)
    settings: dict[str, Any] = {"admission": "predictive", "tbt_s": 0.1, "ttft_s": 1.0}
    driver = Driver(modeled(model, **settings, token_budget=64, max_running_per_tenant=1))
    waits_s: list[float] = []
    for number in range(1, 5):
        prompt, sampling = (number,) * 20, SamplingParams(400)
        driver.submit(Request(number, prompt, sampling, driver.now_s, tenant="capped"))
        if (refusal := driver.callers[number].refused) is not None:
            waits_s.append(refusal.retry_after_s or 0.0)
        for _ in range(5 if number == 1 else 0):
            driver.answer()
    later_s = [after - before for before, after in itertools.pairwise(waits_s)]
    assert len(later_s) == 2
    assert all(0.8 * waits_s[0] < one < 2.5 * waits_s[0] for one in later_s)


def of_tenant(cap: int | None, **settings: Any) -> tuple[Driver, Callable[..., Refuse | None]]:
    """An engine, and what submits a request of its only tenant."""
    model = CostModel("m", ((1, 0.01), (2048, 0.2)), kv_tokens=60_000, max_model_len=4096)
    settings = {"admission": "predictive", "tbt_s": 0.1, "ttft_s": 1.0} | settings
    limits = {"token_budget": 64, "max_requests": 8, "max_running_per_tenant": cap}
    driver = Driver(modeled(model, **settings, **limits))

    def submit(
        number: int, ttft_s: float | None = None, num_tokens: int = 20, priority: int = 0
    ) -> Refuse | None:
        prompt, objective = (number,) * num_tokens, Objective(ttft_s=ttft_s)
        asked = Request(
            number, prompt, SamplingParams(400), driver.now_s, (), "t", priority, objective
        )
        driver.submit(asked)
        return driver.callers[number].refused

    return driver, submit


def waits_s(driver: Driver, number: int) -> float:
    """How long an accepted request waits from now for its first token."""
    begin_s = driver.now_s
    while driver.callers[number].first is None:
        driver.answer()
    return driver.now_s - begin_s


def assert_told_when_it_would_start(driver: Driver, submit: Callable[..., Refuse | None]) -> None:
    """The next request is refused, for about as long as one that may wait then waits."""
    refusal = submit(50)
    assert refusal is not None
    assert refusal.retry_after_s is not None
    assert submit(51, ttft_s=1e6) is None
    wait_s = waits_s(driver, 51)
    assert 0.5 * wait_s < refusal.retry_after_s < 2.0 * wait_s


@pytest.mark.parametrize("num_live", [0, 1, 3])
def test_the_background_takes_no_place_of_a_tenant_s_cap_from_a_live_request(num_live: int) -> None:
    driver, submit = of_tenant(cap=4)
    for number in range(14):
        is_live = number < num_live
        assert submit(number, *(() if is_live else (1e6, 20, -100))) is None
    for _ in range(50):
        driver.answer()
    assert driver.core.requests.waiting.running_of == {"t": 4}
    assert submit(50) is None
    assert waits_s(driver, 50) < 0.5


def test_behind_its_tenant_s_live_requests_one_waits_as_long_as_without_the_background() -> None:
    for num_background in (0, 10):
        driver, submit = of_tenant(cap=4)
        for number in range(4 + num_background):
            assert submit(number, *(() if number < 4 else (1e6, 20, -100))) is None
        for _ in range(50):
            driver.answer()
        assert_told_when_it_would_start(driver, submit)


@pytest.mark.parametrize("num_answers", [0, 3])
def test_those_whose_prompt_is_not_computed_yet_hold_their_places_until_they_end_too(
    num_answers: int,
) -> None:
    """Of a cap of four, one decodes; three prompts are being computed, or start next."""
    driver, submit = of_tenant(cap=4)
    submit(0)
    for _ in range(50):
        driver.answer()
    for number in range(1, 5):
        assert submit(number, ttft_s=1e6, num_tokens=400) is None
    for _ in range(num_answers):
        driver.answer()
    assert_told_when_it_would_start(driver, submit)


def test_a_cap_that_is_not_reached_changes_no_decision() -> None:
    found: list[list[Refuse | None]] = []
    for cap in (None, 100):
        driver, submit = of_tenant(cap)
        found.append([])
        for number in range(30):
            found[-1].append(submit(number, num_tokens=100, priority=-(number % 3)))
            driver.answer()
    assert found[0] == found[1]
    assert any(found[0])
    assert not all(found[0])
