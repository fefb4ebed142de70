"""Drafts of a draft model: asked for a step ahead, as many as pay, of the requests that gain."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.scheduling.budgets.fixed import FixedBudget
from actors.scheduling.build import build_core
from actors.scheduling.config import ConfigError, SchedulerConfig
from actors.scheduling.event_log import check_replay, config_row, to_row
from actors.scheduling.interfaces import StepTimePredictor
from actors.scheduling.policies import POLICIES
from actors.scheduling.request import Grammar, Request, SamplingParams
from tests.actors.scheduling.driver import Driver
from tests.actors.scheduling.fake_stages import VOCABULARY, FakeStages, Mirror
from tests.actors.scheduling.speculation.costs import Costs


def config(**changes: object) -> SchedulerConfig:
    base = SchedulerConfig(
        num_blocks=60, block_size=4, max_model_len=120, max_step_tokens=128, drafter="model",
        draft_model="small", prefix_cache=False,
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def request(number: int, length: int = 60, **sampling: object) -> Request:
    params = SamplingParams(length, seed=number, **sampling)  # type: ignore[arg-type]
    return Request(number, (1, 2, 3), params, 0.0)


def serve(driver: Driver, wrong: int = 1 << 30, num_requests: int = 1, length: int = 60) -> None:
    """wrong: the draft model guesses every so many tokens wrong."""
    driver.stages.wrong = wrong
    for number in range(num_requests):
        driver.submit(request(number, length))
    driver.drain()
    driver.check_everyone_finished()


@pytest.mark.parametrize("stages", [1, 2])
def test_a_model_that_is_always_right_fills_every_step(stages: int) -> None:
    driver = Driver(config(num_stages=stages, max_drafts=5))
    serve(driver, length=100)
    counts = [len(tokens) for plan in driver.plans for _, tokens in plan.drafts]
    assert counts[-4:-1] == [5, 5, 5]
    assert driver.core.outcomes.num_accepted_drafts == driver.core.speculation.num_drafts
    assert len(driver.plans) < 100 / 5 + 6


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("blocks", [34, 60])
def test_tokens_are_the_same_on_every_policy(policy: str, stages: int, blocks: int) -> None:
    """The driver compares every token with the answer known in advance."""
    driver = Driver(
        config(policy=policy, num_stages=stages, num_blocks=blocks, num_host_blocks=12,
               swap="always", prefix_cache=True)
    )  # fmt: skip
    serve(driver, wrong=4, num_requests=5)
    accepted = driver.core.outcomes.num_accepted_drafts
    assert 0 < accepted < driver.core.speculation.num_drafts


@given(
    wrong=st.integers(1, 9), stages=st.sampled_from([1, 2]), lookahead=st.booleans(),
    events=st.lists(st.sampled_from(["answer", "answer", "answer", "fail", "lose"]), max_size=30),
)  # fmt: skip
def test_offers_survive_failures(
    wrong: int, stages: int, lookahead: bool, events: list[str]
) -> None:
    driver = Driver(config(num_stages=stages, lookahead=lookahead))
    driver.stages.wrong = wrong
    for number in range(3):
        driver.submit(request(number, length=40))
    for event in events:
        if driver.outstanding and len(driver.outstanding[0].slices) > 1 and event == "fail":
            driver.fail(applied=True)
        elif event == "lose" and driver.failures < 2:
            driver.lose()
        elif driver.outstanding:
            driver.answer()
    driver.drain()
    driver.check_everyone_finished()


def test_no_step_is_planned_over_drafts_that_are_coming() -> None:
    driver = Driver(config())
    driver.submit(request(1))
    while driver.outstanding:
        asked = [bool(plan.drafts_asked) for plan in driver.outstanding]
        assert not any(asked[:-1])
        driver.answer()


def test_a_model_that_is_wrong_is_asked_less_and_less() -> None:
    driver = Driver(config(num_blocks=200, max_model_len=700))
    serve(driver, wrong=1, length=600)
    asked = [plan.step_id for plan in driver.plans if plan.drafts_asked]
    assert 0 < len(asked) < 20
    assert asked[-1] > 400, "nothing would ever be learned again"


def test_a_request_with_a_hard_beginning_is_asked_again_beside_one_that_gains() -> None:
    class HardBeginning(FakeStages):
        def _guess(self, mirror: Mirror, at: int, count: int) -> tuple[int, ...]:
            guess = super()._guess(mirror, at, count)
            if mirror.seed == 2 and at < 33:
                return tuple([(token + 1) % VOCABULARY for token in guess])
            return guess

    driver = Driver(config(num_blocks=2000, max_model_len=2500))
    driver.stages = HardBeginning(driver.config)
    driver.submit(request(2, length=300))
    driver.submit(request(100, length=2400))
    while driver.callers[2].finish is None:
        driver.answer()
    steps = [
        plan for plan in driver.plans if any(part.request_id == 2 for part in plan.named_slices)
    ]
    assert len(steps) < 200, "one token a step to its end"


@pytest.mark.parametrize("stages", [1, 2])
def test_grammars_are_asked_without_a_model(stages: int) -> None:
    driver = Driver(config(drafter="lookup", draft_model=None, num_stages=stages, max_drafts=4))
    driver.submit(request(1, grammar=Grammar("regex", "a*")))
    driver.drain()
    driver.check_everyone_finished()
    assert driver.core.outcomes.num_accepted_drafts == driver.core.speculation.num_drafts > 40


def test_grammars_that_force_nothing_let_steps_be_planned_ahead() -> None:
    """They are asked now and then, for what comes next may be forced."""
    settings = config(drafter="lookup", draft_model=None, num_blocks=200, max_model_len=700)
    driver = Driver(settings)
    driver.stages.offers = False
    for number in range(2):
        driver.submit(request(number, length=600, grammar=Grammar("regex", "a*")))
    driver.drain()
    driver.check_everyone_finished()
    asked = [bool(plan.drafts_asked) for plan in driver.plans]
    assert 20 < sum(asked) < 120
    assert any(asked[-32:])


def test_prompts_that_wait_leave_no_room() -> None:
    driver = Driver(config(token_budget=8))
    driver.submit(request(1))
    driver.answer()
    driver.submit(Request(2, tuple(range(80)), SamplingParams(1), 0.0))
    while driver.core.requests.prefilling or driver.core.requests.num_waiting:
        driver.answer()
        plan = driver.plans[-1]
        is_last_chunk = not driver.core.requests.prefilling
        assert is_last_chunk or not (plan.drafts or plan.drafts_asked)
    driver.drain()
    driver.check_everyone_finished()


def test_no_more_is_asked_than_can_follow() -> None:
    driver = Driver(config(max_drafts=8))
    serve(driver, length=6)
    for plan in driver.plans:
        ends = {i: start + count for i, start, count, _ in plan.slices}
        for request_id, count in plan.drafts_asked:
            # The token drawn is at the slice's end at the latest, and the request ends at 3 + 6.
            assert ends[request_id] + 1 + count <= 9


def test_offers_are_in_the_log_and_replay() -> None:
    driver = Driver(config(drafter="auto"), build_core(config(drafter="auto"), cost_model=Costs(8)))
    driver.stages.pass_s = 0.0003
    serve(driver, wrong=5, num_requests=3)
    assert any(plan.drafts for plan in driver.plans)
    rows = [config_row(driver.config), *(to_row(*entry) for entry in driver.log)]
    again = build_core(driver.config, cost_model=Costs(8))
    assert check_replay(rows, again) == len(rows)


# ---- the price ----------------------------------------------------------------------------


def priced(
    costs: StepTimePredictor | None, pass_s: float, num_requests: int = 1, budget: int = 512
) -> Driver:
    """A life with a model that is right in nine of ten tokens, whose passes take this long."""
    settings = config(drafter="auto", num_blocks=1300, max_model_len=400, max_drafts=6)
    core = build_core(settings, budget=FixedBudget(budget), cost_model=costs)
    driver = Driver(settings, core)
    driver.stages.pass_s = pass_s
    serve(driver, wrong=10, num_requests=num_requests, length=300)
    return driver


def share_with_drafts(driver: Driver) -> float:
    late = driver.plans[len(driver.plans) // 2 :]
    return sum(bool(plan.drafts) for plan in late) / len(late)


def test_auto_asks_where_a_cost_model_predicts_a_gain() -> None:
    assert share_with_drafts(priced(None, 0.0)) == 0
    assert share_with_drafts(priced(Costs(8), pass_s=0.0004)) > 0.9


def test_drafts_vanish_where_passes_take_too_long() -> None:
    """Of the model: learned from the first steps that it was asked in."""
    assert share_with_drafts(priced(Costs(8), pass_s=0.008)) < 0.05


def test_drafts_vanish_under_load() -> None:
    """Sixteen streams fill a step of eight tokens twice: a draft costs as much as a token."""
    driver = priced(Costs(8), pass_s=0.0004, num_requests=16)
    full = [plan for plan in driver.plans if len(plan.slices) == 16]
    assert len(full) > 200
    assert not any(plan.drafts for plan in full)
    assert sum(count for plan in full for _, count in plan.drafts_asked) <= 3  # to be compared


def test_drafting_takes_no_longer_than_the_budget_allows() -> None:
    """A budget with room for two more tokens: two milliseconds, so one pass of 1.5 of them."""
    driver = priced(Costs(1), pass_s=0.0015, budget=3)
    most = max(count for plan in driver.plans[8:] for _, count in plan.drafts_asked or ((0, 0),))
    assert most <= 1


def test_a_model_that_nothing_uses_is_refused() -> None:
    for drafter in ("lookup", "none"):
        with pytest.raises(ConfigError, match=rf"^model: has no effect with .*drafter: {drafter}`"):
            config(drafter=drafter).check()
    with pytest.raises(ConfigError, match=r"^drafter: model needs a folder, `speculation\.model`"):
        config(draft_model=None).check()
