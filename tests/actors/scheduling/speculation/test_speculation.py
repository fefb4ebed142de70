"""Drafts decide how many tokens a step yields, never which; what they took is given back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.scheduling.budgets.fixed import FixedBudget
from actors.scheduling.build import build_core
from actors.scheduling.config import ConfigError, SchedulerConfig
from actors.scheduling.event_log import check_replay, config_row, to_row
from actors.scheduling.events import Emit, StepDone
from actors.scheduling.plan import NOT_FINITE
from actors.scheduling.policies import POLICIES
from actors.scheduling.request import FinishReason, Grammar, Request, SamplingParams
from tests.actors.scheduling.driver import Driver
from tests.actors.scheduling.fake_stages import VOCABULARY, expected_output
from tests.actors.scheduling.speculation.costs import Costs

LIMIT = 120


def config(**changes: object) -> SchedulerConfig:
    base = SchedulerConfig(
        num_blocks=60, block_size=4, max_model_len=LIMIT, max_step_tokens=128, drafter="lookup",
        prefix_cache=False,
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def copying(request_id: int, length: int = 40, seed: int = 0, **sampling: object) -> Request:
    """A request whose prompt holds, after its first tokens, what it is going to answer."""
    params = SamplingParams(length, seed=seed, **sampling)  # type: ignore[arg-type]
    return Request(request_id, (1, 2, 3), params, 0.0)


def quoting(request_id: int, seed: int) -> Request:
    """Random answers repeat few n-grams by chance: a vocabulary of eleven makes some drafts."""
    prompt = tuple((seed + i * i) % VOCABULARY for i in range(20))
    return Request(request_id, prompt, SamplingParams(60, seed=seed), 0.0)


class Oracle:
    """A drafter that knows the answer, but for every `wrong`-th token. Of the fake stages."""

    rest = 0

    def __init__(self, request: Request, wrong: int) -> None:
        self.acceptance_rate = 0.9
        self._answer, _ = expected_output(request, LIMIT)
        self._wrong = wrong
        self._known = 0

    def follow(self, output: list[int]) -> bool:
        self._known = len(output)
        return True

    def draft(self, most: int) -> tuple[int, ...]:
        tokens = self._answer[self._known : self._known + most]
        return tuple(
            (t + 1) % VOCABULARY if (self._known + k) % self._wrong == self._wrong - 1 else t
            for k, t in enumerate(tokens)
        )


def with_oracle(driver: Driver, request: Request, wrong: int) -> None:
    driver.submit(request)
    driver.core.requests.by_id[request.request_id].drafter = Oracle(request, wrong)


@pytest.mark.parametrize("stages", [1, 2])
def test_right_drafts_are_delivered_together(stages: int) -> None:
    driver = Driver(config(num_stages=stages))
    with_oracle(driver, copying(1), wrong=10**6)
    driver.drain()
    driver.check_everyone_finished()
    # The first token comes of the prompt (and with one stage the second of a step planned ahead),
    # the others nine at a time.
    assert len(driver.plans) == (7 if stages == 1 else 6)
    assert driver.core.outcomes.num_accepted_drafts == driver.core.speculation.num_drafts


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("blocks", [34, 60])
def test_tokens_are_the_same_on_every_policy(policy: str, stages: int, blocks: int) -> None:
    """Preemption (34 blocks hold one request and a bit), swapping, wrong drafts, plain neighbors;
    the driver compares every token with the answer known in advance, and every KV slot read."""
    driver = Driver(
        config(policy=policy, num_stages=stages, num_blocks=blocks, num_host_blocks=12,
               swap="always", prefix_cache=True)
    )  # fmt: skip
    for number in range(5):
        request = copying(number, length=60, seed=number)
        if number % 2:
            driver.submit(request)
        else:
            with_oracle(driver, request, wrong=3 + number)
    driver.drain()
    driver.check_everyone_finished()
    assert driver.core.outcomes.num_accepted_drafts > 0
    assert driver.core.outcomes.num_accepted_drafts < driver.core.speculation.num_drafts


@given(
    wrong=st.integers(1, 9), stages=st.sampled_from([1, 2]), lookahead=st.booleans(),
    events=st.lists(st.sampled_from(["answer", "answer", "answer", "fail", "lose"]), max_size=30),
)  # fmt: skip
def test_drafts_survive_failures(
    wrong: int, stages: int, lookahead: bool, events: list[str]
) -> None:
    driver = Driver(config(num_stages=stages, lookahead=lookahead))
    for number in range(3):
        with_oracle(driver, copying(number, seed=number), wrong=wrong + number)
    for event in events:
        if driver.outstanding and len(driver.outstanding[0].slices) > 1 and event == "fail":
            driver.fail(applied=True)
        elif event == "lose" and driver.failures < 2:
            driver.lose()
        elif driver.outstanding:
            driver.answer()
    driver.drain()
    driver.check_everyone_finished()


def test_an_end_among_drafts_ends_the_request() -> None:
    answer, _ = expected_output(copying(1), LIMIT)
    stop = answer[11]
    first = answer.index(stop)
    driver = Driver(config())
    with_oracle(driver, copying(1, stop_token_ids=(stop,)), wrong=10**6)
    driver.drain()
    assert driver.callers[1].tokens == answer[: first + 1]
    driver.check_everyone_finished()


def test_what_comes_behind_an_end_counts_neither_as_accepted_nor_as_served() -> None:
    answer, _ = expected_output(copying(1), LIMIT)
    stop = answer[11]
    delivered = answer.index(stop) + 1
    driver = Driver(config(order="fair", policy="fair", lookahead=False))
    with_oracle(driver, copying(1, stop_token_ids=(stop,)), wrong=10**6)
    driver.core.requests.by_id[1].drafter._answer = answer  # beyond the stop
    driver.drain()
    assert len(driver.callers[1].tokens) == delivered
    assert 0 < driver.core.outcomes.num_accepted_drafts < delivered
    order: Any = driver.core.requests.waiting.order
    num_prompt = len(driver.callers[1].request.prompt)
    assert list(order.live.counters.values()) == [num_prompt + 2 * delivered]


@pytest.mark.parametrize("stops", [False, True])
def test_tokens_before_a_draw_that_is_not_finite_are_delivered(stops: bool) -> None:
    """As without drafts, where the steps that drew them were answered before."""
    answer, _ = expected_output(copying(1), LIMIT)
    stop = (answer[11],) if stops else ()
    driver = Driver(config(lookahead=False))
    with_oracle(driver, copying(1, stop_token_ids=stop), wrong=10**6)
    driver.core.requests.by_id[1].drafter._answer = answer
    caller, end = driver.callers[1], answer.index(answer[11]) + 1
    while len(driver.outstanding[0].drafts) == 0 or len(caller.tokens) + 8 < end:
        driver.answer()
    before, drawn = len(caller.tokens), 1 + len(driver.outstanding[0].drafts[0][1])
    plan = driver.outstanding.popleft()
    result = driver.stages.run(plan)
    ((number, extra),) = result.extra_tokens
    count = max(end - before, 1) if stops else drawn - 1
    drafts = answer[before + 1 : before + count]
    driver.send(StepDone(replace(result, extra_tokens=((number, (*drafts, NOT_FINITE)),))))
    assert len(extra) + 1 == drawn
    assert caller.tokens == answer[: before + count]
    assert caller.finish is (FinishReason.STOP if stops else FinishReason.ERROR)
    driver.check_everyone_finished(but_errors=[] if stops else [1])


def test_accepted_drafts_use_up_the_quantum_of_a_level() -> None:
    charged = []
    for wrong in (1, 10**6):
        driver = Driver(config(policy="mlfq", order="mlfq", lookahead=False))
        with_oracle(driver, copying(1), wrong)
        state = driver.core.requests.by_id[1]
        while len(driver.callers[1].tokens) < 30:
            driver.answer()
        charged.append(state.served - len(driver.callers[1].tokens))
    assert charged[0] == charged[1]


@pytest.mark.parametrize("size", [1, 4])
def test_blocks_of_wrong_drafts_are_taken_back_at_once(size: int) -> None:
    driver = Driver(config(block_size=size, num_blocks=120))
    with_oracle(driver, copying(1), wrong=2)
    state = driver.core.requests.by_id[1]
    while len(driver.outstanding) > 0:
        driver.answer()
        assert len(state.block_table) in (0, -(-state.num_computed_tokens // size))
    assert any(plan.trimmed for plan in driver.plans)
    driver.check_everyone_finished()


def test_a_life_with_drafts_replays() -> None:
    driver = Driver(config(lookahead=False))
    for number in range(4):
        driver.submit(quoting(number, seed=number))
    driver.drain()
    assert any(plan.drafts for plan in driver.plans)
    rows = [config_row(driver.config), *(to_row(*entry) for entry in driver.log)]
    assert check_replay(rows) == len(rows)


def test_prompts_that_wait_leave_no_room() -> None:
    driver = Driver(config(token_budget=8))
    with_oracle(driver, copying(1), wrong=10**6)
    driver.answer()
    driver.submit(Request(2, tuple(range(80)), SamplingParams(1), 0.0))
    while driver.core.requests.prefilling or driver.core.requests.num_waiting:
        assert not driver.outstanding[-1].drafts or len(driver.outstanding) > 1
        driver.answer()
    driver.drain()
    assert any(plan.drafts for plan in driver.plans)


def beside_a_long_prompt(**changes: object) -> tuple[Driver, list[tuple[int, int]]]:
    """Three streams, and after a while a prompt whose steps hold 32 tokens of a budget of 64; its
    chunks as (tokens, drafts beside it)."""
    chunks = {"chunks": "dynamic", "high": 32, "low": 32}
    settings = config(token_budget=64, num_blocks=120, policy_options=chunks, **changes)
    driver = Driver(settings)
    for number in range(3):
        request = copying(number, length=100, seed=number)
        with_oracle(driver, request, wrong=5)
    for _ in range(6):
        driver.answer()
    driver.submit(Request(9, tuple(range(115)), SamplingParams(2), 0.0))
    driver.drain()
    driver.check_everyone_finished()
    found = []
    for plan in driver.plans:
        found += [(n, len(plan.drafts)) for i, start, n, _ in plan.slices if i == 9 and start < 115]
    return driver, found


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("lookahead", [True, False])
def test_drafts_fill_what_a_long_prefill_leaves(stages: int, lookahead: bool) -> None:
    """The prompt has the same chunks as without drafts, so its first token as many steps later."""
    settings: dict[str, object] = {"num_stages": stages, "lookahead": lookahead}
    _, plain = beside_a_long_prompt(drafter="none", max_drafts=None, **settings)
    driver, drafted = beside_a_long_prompt(**settings)
    assert [n for n, _ in drafted] == [n for n, _ in plain]
    assert sum(num_drafts > 0 for _, num_drafts in drafted) >= 2
    assert all(plan.num_tokens <= 64 for plan in driver.plans)


def test_drafts_count_in_the_token_budget() -> None:
    driver = Driver(config(token_budget=5, max_requests=4))
    for number in range(4):
        with_oracle(driver, copying(number, seed=number), wrong=10**6)
    driver.drain()
    assert any(plan.drafts for plan in driver.plans)
    assert all(plan.num_tokens <= 5 for plan in driver.plans)


def test_a_grammar_says_what_it_forces_instead_of_lookup() -> None:
    driver = Driver(config())
    driver.submit(quoting(1, seed=1))
    driver.submit(copying(2, grammar=Grammar("regex", "a*")))
    driver.drain()
    driver.check_everyone_finished()
    assert {i for plan in driver.plans for i, _ in plan.drafts_asked} == {2}


@pytest.mark.parametrize(("costs", "most"), [(None, 0), (Costs(1), 0), (Costs(4), 3)])
def test_auto_needs_a_cost_model_that_predicts_a_gain(costs: Costs | None, most: int) -> None:
    """A draft behind the fourth token of a step would cost what it brings at best."""
    settings = config(drafter="auto", max_drafts=3)
    core = build_core(settings, budget=FixedBudget(512), cost_model=costs)
    driver = Driver(settings, core)
    with_oracle(driver, copying(1), wrong=10**6)
    driver.drain()
    assert max(len(d) for plan in driver.plans for _, d in (*plan.drafts, (0, ()))) == most


def test_texts_are_not_followed_where_no_guess_can_pay_but_remembered() -> None:
    settings = config(drafter="auto")
    core = build_core(settings, budget=FixedBudget(512), cost_model=Costs(1))
    driver = Driver(settings, core)
    driver.submit(quoting(1, seed=1))
    while not core.requests.decoding:
        driver.answer()
    driver.answer()
    assert core.requests.by_id[1].drafter is None
    driver.drain()
    assert not any(plan.drafts for plan in driver.plans)
    driver.submit(quoting(2, seed=2))
    driver.drain()  # reads what was served
    history = core.speculation._histories.of(quoting(3, seed=3))
    assert history.find(driver.callers[1].tokens[10:30])[2] == 20


@pytest.mark.parametrize(("costs", "depth"), [(Costs(1), 2), (Costs(16), 1)])
def test_planning_waits_for_tokens_only_where_a_draft_can_pay(costs: Costs, depth: int) -> None:
    """Likely drafts for all: behind a step of sixteen tokens free, else as dear as a decode."""
    settings = config(drafter="auto", max_drafts=3)
    driver = Driver(settings, build_core(settings, budget=FixedBudget(512), cost_model=costs))
    for number in range(4):
        with_oracle(driver, copying(number, seed=number), wrong=10**6)
    while len(driver.core.requests.decoding) < 4:
        driver.answer()
    driver.answer()
    assert len(driver.core.in_flight) == depth
    driver.drain()
    assert any(plan.drafts for plan in driver.plans) == (depth == 1)


def test_several_tokens_are_one_output() -> None:
    driver = Driver(config())
    with_oracle(driver, copying(1), wrong=10**6)
    driver.drain()
    outputs = [o for *_, out in driver.log for i in out if isinstance(i, Emit) for o in i.outputs]
    assert [o.index for o in outputs] == [0, 1, 2, 11, 20, 29, 38]
    assert sum(len(o.tokens) for o in outputs) == 40


def test_unknown_drafters_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"drafter: unknown 'magic'; known: auto, lookup, mod"):
        config(drafter="magic").check()
    with pytest.raises(ConfigError, match=r"max_drafts: has no effect with .*drafter: none"):
        config(drafter="none", max_drafts=3).check()


@pytest.mark.parametrize("stages", [1, 2])
def test_background_decodes_get_no_drafts_beside_live_ones(stages: int) -> None:
    """Drafts would lengthen the live ones' steps. The live one gets its own, however many of the
    background there are, though one with lookahead waits for its token for them."""
    driver = Driver(config(num_stages=stages, num_blocks=300, max_requests=16))
    for number in range(2, 12):
        driver.submit(replace(copying(number, length=80, seed=number), priority=-5))
    for _ in range(12):
        driver.answer()
    for state in driver.core.requests.decoding:
        state.drafter = Oracle(state.request, wrong=10**6)
    with_oracle(driver, copying(1), wrong=10**6)
    for _ in range(driver.config.depth):
        driver.answer()
    before = len(driver.plans)
    while 1 in driver.core.live_requests:
        driver.answer()
    drafted = {number for plan in driver.plans[before:-2] for number, _ in plan.drafts}
    assert drafted == {1}
    assert (
        len([p for p in driver.plans[before:] if any(q.request_id == 1 for q in p.named_slices)])
        <= 8
    )
    driver.drain()
    driver.check_everyone_finished()
    assert len({number for plan in driver.plans for number, _ in plan.drafts}) > 1
