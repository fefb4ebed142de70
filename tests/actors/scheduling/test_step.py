"""The calls of a policy: each allocates what it needs or changes nothing, in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.scheduling.budgets.fixed import FixedBudget
from actors.scheduling.build import build_core
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.faults import LEAST_TRIAL_TOKENS, MOST_TRIAL_TOKENS, Faults
from actors.scheduling.interfaces import EngineView
from actors.scheduling.plan import StepShape
from actors.scheduling.state import RequestStatus, Suspicion
from tests.actors.scheduling.bench import Bench
from tests.actors.scheduling.driver import Driver
from tests.actors.scheduling.short_lives import config, request
from tests.actors.scheduling.whims import NAMES, Call, Whims


class Patient(Driver):
    """A driver that lets decodes wait, as the policy decides."""

    def _check_no_decode_skipped(self) -> None:
        pass


CONFIGS = st.builds(
    config,
    num_blocks=st.integers(10, 24),
    max_model_len=st.just(40),
    max_requests=st.integers(2, 6),
    max_step_tokens=st.sampled_from([8, 13, 64]),
    token_budget=st.just(64),
    num_stages=st.sampled_from([1, 1, 2]),
    lookahead=st.booleans(),
    overlap_chunks=st.booleans(),
    allocation=st.sampled_from(["prompt", "chunk"]),
    prefix_cache=st.booleans(),
    num_host_blocks=st.sampled_from([0, 8]),
    swap=st.just("always"),
    tile=st.sampled_from([1, 4]),
    drafter=st.sampled_from(["none", "lookup"]),
    policy=st.sampled_from(["vllm", "orca"]),  # orca reserves
)
CALLS = st.builds(Call, st.sampled_from(NAMES), st.integers(0, 5), st.integers(1, 12))
STEPS = st.lists(st.lists(CALLS, min_size=1, max_size=8), max_size=25)
LIVES = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=6)


@settings(max_examples=60)
@given(CONFIGS, STEPS, LIVES)
def test_whatever_a_policy_calls_tokens_and_memory_are_right(
    chosen: SchedulerConfig, steps: list[list[Call]], lives: list[tuple[int, int]]
) -> None:
    """The driver compares every token, and every KV slot that is read, with what it must be."""
    core = build_core(chosen)
    if chosen.drafter == "none":
        steps = [[call for call in calls if call.name != "add_drafts"] for calls in steps]
    core.policy = Whims(core, steps, core.policy)
    driver = Patient(chosen, core)
    for number, (prompt, output) in enumerate(lives):
        driver.submit(request(number, prompt=prompt, output=output))
    driver.drain()
    driver.check_everyone_finished()


def test_a_request_decodes_once_in_a_step() -> None:
    bench = Bench(lookahead=True)  # and may be in two
    first, second = bench.decoding(1, 4), bench.decoding(2, 4)
    step = bench.begin()
    step.decode((second,))
    step.decode_all()
    step.decode((first, second))
    assert bench.ids() == [2, 1]
    assert step.shape == StepShape(2, 10)


@pytest.mark.parametrize("are_chosen", [True, False])
def test_a_request_preempted_for_another_is_left_out(are_chosen: bool) -> None:
    bench = Bench(num_blocks=4)
    first, second = bench.decoding(1, 8), bench.decoding(2, 7)  # the memory is full
    step = bench.begin()
    step.decode(step.runnable_decodes() if are_chosen else step.decoding)
    assert bench.ids() == [1]
    assert second.status is RequestStatus.WAITING
    assert (len(first.block_table), first.num_computed_tokens) == (3, 9)


def test_a_request_in_the_step_already_is_not_preempted() -> None:
    bench = Bench(num_blocks=4)
    first, second = bench.decoding(1, 8), bench.decoding(2, 7)
    step = bench.begin()
    step.decode((second,))
    step.decode((first,))
    assert bench.ids() == [2]
    assert (len(first.block_table), first.num_computed_tokens, first.in_flight) == (2, 8, 0)
    assert bench.requests.running.claimant is first
    step.preempt(second)
    assert second.status is RequestStatus.RUNNING
    assert step.add_drafts(second, (1, 2)) == 0  # nor for drafts


def test_drafts_take_no_block_that_a_request_waits_for() -> None:
    bench = Bench(num_blocks=6)
    first, second, third = (bench.decoding(n, prompt) for n, prompt in ((1, 8), (2, 7), (3, 5)))
    bench.requests.preempt(first)  # two blocks are free
    step = bench.begin()
    step.decode((second, third))
    bench.requests.running.claim(second)
    assert step.add_drafts(second, (1, 2, 3)) == 0
    assert step.add_drafts(third, (1, 2, 3)) == 2  # the rest of its block
    bench.requests.running.claimant = None
    assert step.add_drafts(second, (1, 2, 3)) == 0  # the preempted one will need those
    bench.requests.end(first)
    assert step.add_drafts(second, (1, 2, 3)) == 3
    assert [len(s.block_table) for s in (second, third)] == [3, 2]
    assert step.contents.drafts == [(3, (1, 2)), (2, (1, 2, 3))]
    assert step.shape == StepShape(0, 0, ((5, 3), (7, 4)), num_drafted=2)
    assert not step.contents.decodes_alone


def test_drafts_preempt_no_request() -> None:
    bench = Bench(num_blocks=4)
    first, second = bench.decoding(1, 7), bench.decoding(2, 8)  # the memory is full
    step = bench.begin()
    step.decode((first,))
    assert step.add_drafts(first, (1, 2)) == 0
    assert (second.status, first.num_drafts) == (RequestStatus.RUNNING, 0)
    assert step.contents.decodes_alone == [first]


def test_a_chunk_is_cut_to_the_memory_that_is_left() -> None:
    bench = Bench(num_blocks=4, allocation="chunk")
    first, second = bench.decoding(1, 7), bench.waiting(2, 20)
    assert bench.begin().start(second, 3) == 3
    second.in_flight = 0
    step = bench.begin()
    assert step.chunk(second, 12) == 5  # the rest of its block, and the last free one
    assert (second.num_computed_tokens, len(second.block_table)) == (8, 2)
    assert bench.requests.running.claimant is None
    second.in_flight = 0
    assert bench.begin().chunk(second, 12) == 0
    assert (second.num_computed_tokens, second.in_flight) == (8, 0)
    assert first.status is RequestStatus.RUNNING  # of a better rank


def test_a_prompt_that_is_to_be_whole_starts_whole_or_not_at_all() -> None:
    bench = Bench(max_step_tokens=12)
    short, long = bench.waiting(1, 10), bench.waiting(2, 30)
    step = bench.begin()
    assert step.start(short, 9, whole=True) == 0
    assert step.head() is short
    assert step.start(short, 10, whole=True) == 10
    assert step.start(long, 12, whole=True) == 0  # 2 are left of the stages' buffers
    assert bench.begin().start(long, 12, whole=True) == 12  # which never hold it


def test_chunks_end_with_the_stages_buffers() -> None:
    bench = Bench(max_step_tokens=12)
    prompts = [bench.waiting(n, 30) for n in (1, 2)]
    for state in prompts:
        bench.begin().start(state, 5)
        state.in_flight = 0
    step = bench.begin()
    calls = ((prompts[0], 4), (prompts[0], 6), (prompts[1], 10))
    assert [step.chunk(state, limit) for state, limit in calls] == [4, 6, 2]
    assert step.room == 0
    assert step.shape == StepShape(prefills=((5, 10), (5, 2)))
    assert prompts[0].in_flight == 1


class Closed(FixedBudget):
    def may_start(self, engine: EngineView) -> bool:
        return False


def test_a_budget_that_lets_none_start_lets_one_run() -> None:
    bench = Bench(Closed(64))
    first, second = bench.waiting(1, 4), bench.waiting(2, 4)
    step = bench.begin()
    assert step.start(first, 64) == 4
    assert step.start(second, 64) == 0
    assert step.head() is second


@pytest.mark.parametrize("is_trial", [True, False])
def test_suspects_share_no_step_with_others(is_trial: bool) -> None:
    bench = Bench(max_step_tokens=32)
    decodes = [bench.decoding(n, 4) for n in (1, 2)]
    prompts = [bench.waiting(n, 40) for n in (3, 4)]
    for state in prompts:
        bench.begin().start(state, 8)
        state.in_flight = 0
    for suspect in (decodes[1], prompts[1]):
        suspect.suspicion = Suspicion()
    bench.requests.trials.append([decodes[1], prompts[1]])
    step = bench.begin()
    step.is_trial = is_trial
    assert step.runnable_decodes() == decodes[:1]
    assert step.runnable_prefills() == prompts[:1]
    step.decode_all()
    chunks = [step.chunk(state, 8) for state in prompts]
    assert (bench.ids(), chunks) == (([2], [0, 8]) if is_trial else ([1], [8, 0]))


@pytest.mark.parametrize(
    ("budget", "tokens"),
    [(10, LEAST_TRIAL_TOKENS), (500, 498), (10**6, MOST_TRIAL_TOKENS)],
)
def test_a_trial_is_as_long_as_the_budget_beside_all_decodes(budget: int, tokens: int) -> None:
    bench = Bench(FixedBudget(budget))
    bench.decoding(1, 4)
    bench.decoding(2, 4)
    assert Faults(bench.requests).trial_tokens(bench.begin()) == tokens


def test_a_trial_leaves_room_for_what_decodes_compute_again() -> None:
    """Where layers keep states, a decode after wrong drafts is as long as what it lacks."""
    asked: list[StepShape] = []

    class Asked(FixedBudget):
        def num_tokens(self, shape: StepShape, engine: EngineView) -> int:
            asked.append(shape)
            return super().num_tokens(shape, engine)

    bench = Bench(Asked(500), num_saved_states=0)
    bench.decoding(1, 4)
    back = bench.decoding(2, 9)
    back.go_back(3)
    assert Faults(bench.requests).trial_tokens(bench.begin()) == 500 - 1 - 4
    assert asked == [StepShape(1, 5, ((6, 4),), num_drafted=1)]


def test_background_requests_keep_no_live_one_from_starting() -> None:
    class NoMore(FixedBudget):
        def may_start(self, engine: EngineView) -> bool:
            return False

    bench = Bench(NoMore(64))
    bench.decoding(1, 4, priority=-1)
    head = bench.waiting(2, 4)
    step = bench.begin()
    assert step.start(head, 4) == 0
    step.narrow(is_background=False)
    assert step.start(head, 4) == 4
    step.narrow(is_background=True)
    assert step.start(bench.waiting(3, 4, priority=-1), 4) == 0


def test_a_background_decode_that_gives_way_takes_no_other_decode_along() -> None:
    """It may be before the one that needs its memory, and the one after it has all it needs."""
    driver = Driver(config(policy="vllm", num_blocks=6, watermark=0.0, token_budget=64))
    driver.submit(request(1, prompt=8, output=14, priority=-1, arrival_s=0.0))
    driver.submit(request(2, prompt=8, output=14, arrival_s=20.0))
    driver.submit(request(3, prompt=5, output=9, arrival_s=21.0))
    for _ in range(9):
        driver.answer()
    last = next(plan for plan in driver.plans if plan.released)
    assert {part.request_id for part in last.named_slices} == {2, 3}
