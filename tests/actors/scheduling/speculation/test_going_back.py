"""Where layers keep a state, a request with a wrong draft goes back to its slice's beginning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from actors.scheduling.budgets.background import BackgroundRoom
from actors.scheduling.budgets.fixed import FixedBudget
from actors.scheduling.build import build_core
from actors.scheduling.cost.online import read_cost_model
from actors.scheduling.plan import StepPlan, StepShape
from actors.scheduling.policies import POLICIES
from tests.actors.scheduling.driver import Driver
from tests.actors.scheduling.speculation.costs import Costs
from tests.actors.scheduling.speculation.test_speculation import config, copying, with_oracle

STATES = {"num_saved_states": 2, "swap": "never", "max_requests": 8}


def driver_of(costs: Costs | None, **changes: Any) -> Driver:
    settings = config(**{**STATES, **changes})
    return Driver(settings, build_core(settings, budget=FixedBudget(128), cost_model=costs))


def lengths_of(plans: list[StepPlan]) -> list[tuple[int, int, int]]:
    """Of each slice of request 1: its start, its known tokens, its drafts."""
    found = []
    for plan in plans:
        num_drafts = len(dict(plan.drafts).get(1, ()))
        found += [(s, n - num_drafts, num_drafts) for i, s, n, _ in plan.slices if i == 1]
    return found


@pytest.mark.parametrize("stages", [1, 2])
def test_what_is_known_of_a_slice_is_computed_again(stages: int) -> None:
    """Every ninth token is guessed wrong. Without a cost model, a slice that computes tokens again
    has no drafts."""
    driver = driver_of(None, num_stages=stages, lookahead=False, max_drafts=4)
    with_oracle(driver, copying(1, length=20), wrong=9)
    driver.drain()
    driver.check_everyone_finished()
    assert lengths_of(driver.plans) == [
        (0, 3, 0), (3, 1, 4), (8, 1, 4), (8, 4, 0), (12, 1, 4), (17, 1, 4), (17, 4, 0), (21, 1, 0),
    ]  # fmt: skip


def test_a_slice_that_is_computed_again_may_carry_drafts() -> None:
    """Where they are cheap: those before them are then computed once more if one is wrong."""
    driver = driver_of(Costs(64), lookahead=False, max_drafts=4)
    with_oracle(driver, copying(1, length=20), wrong=3)
    driver.drain()
    driver.check_everyone_finished()
    starts = [start for start, _, num_drafts in lengths_of(driver.plans) if num_drafts]
    assert any(starts.count(start) > 2 for start in starts)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("blocks", [34, 60])
def test_tokens_are_the_same_on_every_policy(policy: str, stages: int, blocks: int) -> None:
    """Preemption, wrong drafts, buffers that hold little more than the decodes; the stages compare
    the state before each slice with that of all tokens before it."""
    driver = driver_of(
        Costs(16), policy=policy, num_stages=stages, num_blocks=blocks, prefix_cache=True,
        max_step_tokens=20,
    )  # fmt: skip
    for number in range(5):
        with_oracle(driver, copying(number, length=60, seed=number), wrong=3 + number)
    driver.drain()
    driver.check_everyone_finished()
    assert 0 < driver.core.outcomes.num_accepted_drafts < driver.core.speculation.num_drafts


def test_buffers_hold_every_decode_after_wrong_drafts() -> None:
    """Prompts go first; then the others decode beside the one that computes its slice again."""
    driver = driver_of(None, policy="vllm", lookahead=False, max_step_tokens=12)
    with_oracle(driver, copying(1, length=20), wrong=8)
    driver.answer()
    for number in range(2, 9):
        driver.submit(copying(number, length=20, seed=number))
    driver.drain()  # it checks the length of every step
    driver.check_everyone_finished()
    assert any(num_known > 1 for _, num_known, _ in lengths_of(driver.plans)[1:])


@pytest.mark.parametrize("budget", [20, 128])
def test_background_requests_go_on_after_wrong_drafts(budget: int) -> None:
    """Beside a long live prompt that would fill the steps."""
    settings = config(**STATES, lookahead=False, max_step_tokens=20)
    driver = Driver(settings, build_core(settings, budget=FixedBudget(budget)))
    with_oracle(driver, replace(copying(1, length=60), priority=-1), wrong=5)
    driver.submit(replace(copying(2, length=60, seed=2), priority=-1))
    while len(dict(driver.outstanding[0].drafts).get(1, ())) < 6:
        driver.answer()
    driver.submit(replace(copying(3), prompt=tuple(range(1, 10)) * 11))
    num_before = len(driver.plans)
    for _ in range(4):
        driver.answer()
        assert driver.core.requests.prefilling
    beside = lengths_of(driver.plans[num_before:])
    assert next(num_known for _, num_known, _ in beside) > 3
    assert len(beside) > 1
    driver.drain()
    driver.check_everyone_finished()


def num_waits(
    costs: Costs | None, rate: float, num_left: int | None = None, **changes: Any
) -> tuple[int, int]:
    """With lookahead: how often no step was planned ahead of four streams whose drafts are right
    with this probability, and the drafts. num_left: tokens that a constant budget leaves them."""
    driver = driver_of(costs, lookahead=True, drafter="auto" if costs else "lookup", **changes)
    for number in range(4):
        with_oracle(driver, copying(number, length=60, seed=number), wrong=10**6)
        drafter = driver.core.requests.by_id[number].drafter
        assert drafter is not None
        drafter.acceptance_rate = rate
    while len(driver.core.requests.decoding) < 4:
        driver.answer()
    if num_left is not None:
        builder: Any = driver.core.builder
        builder.budget = replace(builder.budget, tokens=4 + num_left)
    num = 0
    for _ in range(20):
        driver.answer()
        num += len(driver.outstanding) < 2
    return num, driver.core.speculation.num_drafts


def test_no_plan_waits_for_drafts_that_cannot_pay_as_a_wrong_one_costs_twice() -> None:
    """A draft takes as long as 0.4 of the tokens of four decodes, and as long again if it is wrong:
    it pays from a rate of 0.4 on, and with states from one of 0.57."""
    for rate, pays, pays_with_states in ((0.53, True, False), (0.7, True, True)):
        plain = num_waits(Costs(1, more=6), rate, num_saved_states=None)
        with_states = num_waits(Costs(1, more=6), rate)
        assert [bool(n) for n in plain] == [pays] * 2
        assert [bool(n) for n in with_states] == [pays_with_states] * 2


def test_no_plan_waits_for_drafts_that_never_fit() -> None:
    """Buffers that hold a decode of each request, and nothing to be computed again."""
    assert num_waits(None, 0.9, max_step_tokens=8) == (0, 0)
    # Nor for those that the budget leaves no token, but for a look every sixteen steps.
    assert num_waits(None, 0.9, num_left=0, num_saved_states=None)[0] <= 4
    waits, drafts = num_waits(None, 0.9, max_step_tokens=10)
    assert waits
    assert drafts


_COSTS = {"name": "slow", "tokens_s": [[1, 0.01], [64, 0.011], [128, 0.015], [1024, 0.12]]}


@pytest.mark.parametrize("tbt_s", [0.03, None])
def test_prompts_give_way_to_a_lone_stream_that_computes_tokens_again(tbt_s: float | None) -> None:
    """As to one that decodes one token, whenever they arrive."""
    settings = config(
        **STATES, lookahead=False, max_step_tokens=1024, max_model_len=2000, num_blocks=1000,
        budget="adaptive", tbt_s=tbt_s, cost_model=_COSTS, max_drafts=4,
    )  # fmt: skip
    first_steps = []
    for num_answers in range(2, 20):
        driver = Driver(settings, build_core(settings))
        with_oracle(driver, copying(1, length=100), wrong=6)
        for _ in range(num_answers):
            driver.answer()
        driver.submit(replace(copying(2), prompt=tuple(range(1, 1500))))
        driver.answer()
        first_steps.append({i: n for i, _, n, _ in driver.plans[-1].slices})
    assert any(step[1] > 1 and 2 in step for step in first_steps)
    assert max(step.get(2, 0) for step in first_steps) < 256


def test_background_work_beside_tokens_computed_again_is_as_much_as_beside_a_decode() -> None:
    cost = read_cost_model(_COSTS)
    assert cost is not None
    shapes = (StepShape(1, 33), StepShape(prefills=((31, 2),), num_drafted=1))
    most = [BackgroundRoom(cost).num_decodes(shape, 200, 50) for shape in shapes]
    assert most[1] >= most[0] - 1 > 10


def total_s(least: int, num_requests: int, wrong: int | None, **changes: Any) -> float:
    """The time of all steps by the same costs. wrong: None: without drafts."""
    costs = Costs(least)
    driver = driver_of(costs, lookahead=False, **changes)
    driver.core.speculation.is_on = wrong is not None
    for number in range(num_requests):
        with_oracle(driver, copying(number, length=100, seed=number), wrong or 1)
        drafter = driver.core.requests.by_id[number].drafter
        assert drafter is not None
        drafter.acceptance_rate = 1.0 - 1.0 / (wrong or 1)
    driver.drain()
    shapes = [StepShape(prefills=tuple((s, n) for _, s, n, _ in p.slices)) for p in driver.plans]
    return sum(map(costs.step_s, shapes))


@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize("least", [1, 2, 4, 8, 12, 16, 64])
def test_drafts_never_take_longer_than_they_save(least: int, num_requests: int) -> None:
    """Whatever share of them is right, and however many tokens of a step are free."""
    plain_s = total_s(least, num_requests, None)
    drafted_s = [total_s(least, num_requests, wrong) for wrong in (2, 3, 4, 6, 10, 30)]
    assert max(drafted_s) <= plain_s * (1 + 1e-9)
    if least >= 8:
        assert drafted_s[-1] < 0.4 * plain_s


def test_no_plan_waits_where_the_token_in_flight_and_the_draft_are_hardly_both_right() -> None:
    assert num_waits(None, 0.3, num_saved_states=None)[0] == 0
    assert num_waits(None, 0.6, num_saved_states=None)[0] > 0


def test_what_did_not_pay_is_looked_at_again_after_sixteen_steps() -> None:
    """Drafts of these rates pay for one, as is predicted from time to time, but not together."""
    driver = driver_of(Costs(1, more=6), lookahead=False, drafter="auto", num_saved_states=None)
    for number in range(4):
        with_oracle(driver, copying(number, length=60, seed=number), wrong=10**6)
    states = [driver.core.requests.by_id[number] for number in range(4)]
    for state in states:
        assert state.drafter is not None
        state.drafter.acceptance_rate = 0.45
    while len(driver.core.requests.decoding) < 4:
        driver.answer()
    driver.answer()
    for state in states:
        assert state.drafter is not None
        state.drafter.acceptance_rate = 0.95
    before = len(driver.plans)
    while not driver.plans[-1].drafts:
        driver.answer()
    assert 16 <= len(driver.plans) - before <= 18


def test_prompts_that_leave_no_room_wait_for_no_drafts() -> None:
    """Their steps are planned ahead, though the stream beside them has likely drafts."""
    driver = Driver(config(token_budget=8, num_blocks=120))
    with_oracle(driver, copying(1, length=100), wrong=10**6)
    driver.answer()
    driver.submit(replace(copying(2), prompt=tuple(range(80))))
    driver.answer()
    driver.answer()
    depths = []
    while driver.core.requests.prefilling:
        driver.answer()
        depths.append(len(driver.outstanding))
    assert depths.count(2) > len(depths) // 2 > 2
