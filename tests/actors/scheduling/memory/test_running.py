"""KV memory: preemption, reservation, swapping, cached prefixes, prompts shared by a group."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.scheduling.build import build_core
from actors.scheduling.lifecycle import LiveRequests
from actors.scheduling.plan import StepShape
from actors.scheduling.policies import POLICIES
from actors.scheduling.request import FinishReason
from actors.scheduling.state import RequestState, RequestStatus
from actors.scheduling.statistics import statistics
from tests.actors.scheduling.driver import Driver
from tests.actors.scheduling.short_lives import config, request


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("allocation", ["prompt", "chunk"])
def test_memory_for_one_is_enough_for_all(policy: str, allocation: str) -> None:
    driver = Driver(
        config(num_blocks=16, policy=policy, allocation=allocation, lookahead=True, swap="never")
    )
    for number in range(6):
        driver.submit(request(number, prompt=10 + 5 * number, output=20))
    driver.drain()
    driver.check_everyone_finished()
    assert all(len(caller.tokens) == 20 for caller in driver.callers.values())


def test_preemption_takes_the_worst_rank_and_keeps_its_tokens() -> None:
    driver = Driver(config(num_blocks=6, max_model_len=24, watermark=0.0))
    driver.submit(request(1, prompt=8, output=10))
    driver.submit(request(2, prompt=8, output=10))
    while not statistics(driver.core)["num_preemptions"]:
        driver.answer()
    assert driver.core.requests.by_id[2].status.value == "waiting"
    told = len(driver.callers[2].tokens)
    assert told > 1
    driver.drain()
    first, again, *_ = (s for p in driver.plans for s in p.started if s.request_id == 2)
    assert len(first.tokens) == 8
    assert len(again.tokens) == 8 + told  # prompt and everything already delivered
    assert len(driver.callers[2].tokens) == 10


@pytest.mark.parametrize("policy", ["sarathi", "fair", "deadline", "shortest_first", "mlfq"])
def test_a_request_of_the_background_gives_its_memory_to_a_live_one(policy: str) -> None:
    """In order it is the first: it came long before, and asks for the fewest tokens."""
    driver = Driver(config(policy=policy, num_blocks=6, max_model_len=24, watermark=0.0))
    driver.submit(request(1, prompt=8, output=9, priority=-1))
    while not driver.callers[1].tokens:
        driver.answer()
    driver.submit(request(2, prompt=8, output=10, arrival_s=1000.0))
    driver.drain()
    assert [len(driver.callers[n].tokens) for n in (1, 2)] == [9, 10]
    starts = [s.request_id for p in driver.plans for s in p.started]
    assert starts.count(1) > starts.count(2) == 1


def test_the_memory_that_a_request_waits_for_goes_to_no_later_one() -> None:
    """The policy prefers prompts: each time that the second gives its blocks up it would have them
    back at once, before the first has grown."""
    driver = Driver(
        config(policy="vllm", num_stages=3, num_blocks=7, max_model_len=24, watermark=0.0)
    )
    driver.submit(request(0, prompt=10, output=12))
    driver.submit(request(1, prompt=11, output=16))
    driver.drain()
    driver.check_everyone_finished()
    assert statistics(driver.core)["num_preemptions"] == 1


@pytest.mark.parametrize("policy", ["orca", "faster_transformer"])
def test_reserving_the_maximum_length_never_preempts(policy: str) -> None:
    driver = Driver(config(num_blocks=16, policy=policy, lookahead=True))
    for number in range(6):
        driver.submit(request(number, prompt=10, output=20))
    most_running = 0
    while driver.outstanding:
        most_running = max(most_running, driver.core.requests.running.num_requests)
        driver.answer()
    assert most_running == 2  # 8 blocks each, whatever they use so far
    assert statistics(driver.core)["num_preemptions"] == 0
    assert not any(plan.new_blocks for plan in driver.plans)
    driver.check_everyone_finished()


def test_request_level_batches_are_closed() -> None:
    driver = Driver(
        config(policy="faster_transformer", policy_options={"max_batch": 2}, num_blocks=200)
    )
    for number in range(5):
        driver.submit(request(number, output=3 + number))
    driver.drain()
    steps = {
        n: [p.step_id for p in driver.plans for s in p.named_slices if s[0] == n] for n in range(5)
    }
    for first, second in (((0, 1), (2, 3)), ((2, 3), (4,))):
        assert max(steps[n][-1] for n in first) < min(steps[n][0] for n in second)


def test_a_request_level_batch_closes_though_its_members_end_at_once() -> None:
    """Its places are given once: a flood of one-token answers does not hold up its decodes."""
    options = {"max_batch": 2}
    driver = Driver(config(policy="faster_transformer", policy_options=options, num_blocks=200))
    driver.submit(request(0, output=5))
    for number in range(1, 20):
        driver.submit(request(number, output=1))
        if driver.callers[0].finish is None:
            driver.answer()
    assert driver.callers[0].finish is not None
    driver.drain()
    driver.check_everyone_finished()


class FixedCost:
    """Recomputing costs 1 s a token, swapping `block_s` a block."""

    def __init__(self, block_s: float) -> None:
        self.block_s = block_s
        self.observed: list[tuple[StepShape, float]] = []

    def step_s(self, shape: StepShape) -> float:
        return float(shape.num_tokens)

    def latency_s(self, shape: StepShape) -> float:
        return self.step_s(shape)

    def swap_s(self, num_blocks: int) -> float:
        return num_blocks * self.block_s

    def observe(self, shape: StepShape, duration_s: float) -> None:
        self.observed.append((shape, duration_s))


@pytest.mark.parametrize(("block_s", "swaps"), [(0.1, True), (100.0, False)])
def test_swapping_is_chosen_by_predicted_cost(block_s: float, swaps: bool) -> None:
    cost_model = FixedCost(block_s)
    settings = config(num_blocks=6, num_host_blocks=6, max_model_len=24, watermark=0.0)
    driver = Driver(settings, build_core(settings, cost_model=cost_model))
    driver.submit(request(1, prompt=8, output=10))
    assert driver.core.in_flight[0].predicted_s == 8.0
    driver.submit(request(2, prompt=8, output=10))
    driver.drain()
    driver.check_everyone_finished()
    moved = [plan for plan in driver.plans if plan.swap_out or plan.swap_in]
    assert bool(moved) == swaps
    assert statistics(driver.core)["num_preemptions"] > 0
    assert cost_model.observed[0] == (StepShape(0, 0, ((0, 8),)), pytest.approx(0.02))


def test_a_cached_prefix_is_not_computed_again() -> None:
    driver = Driver(config(prefix_cache=True))
    driver.submit(request(1, tokens=tuple(range(14)), output=3))
    driver.drain()
    driver.submit(request(2, tokens=(*range(12), 50, 51), output=3))
    driver.drain()
    driver.submit(request(3, tokens=tuple(range(12)), output=3))  # a hit to its very end
    driver.drain()
    driver.submit(request(4, tokens=tuple(range(12)), output=3, cache_salt="another tenant"))
    driver.drain()
    first = {number: driver.callers[number].first for number in (1, 2, 3, 4)}
    cached = {number: output.num_cached_tokens for number, output in first.items() if output}
    assert cached == {1: 0, 2: 12, 3: 8, 4: 0}  # of 12, the last block is computed for its logits


def test_of_a_stream_begun_before_only_prompt_tokens_count_as_cached() -> None:
    driver = Driver(config(prefix_cache=True))
    driver.submit(request(1, prompt=8, output=20))
    driver.drain()
    before = driver.callers[1]
    driver.submit(
        request(2, tokens=before.request.prompt, output=20, done=tuple(before.tokens[:15]))
    )
    driver.drain()
    first = driver.callers[2].first
    assert first is not None
    assert first.num_cached_tokens == 8
    assert next(s.start for p in driver.plans for s in p.named_slices if s.request_id == 2) == 20


def test_the_cache_survives_preemption_and_serves_replays() -> None:
    driver = Driver(config(prefix_cache=True, num_blocks=9, max_model_len=36, watermark=0.0))
    driver.submit(request(1, prompt=16, output=12))
    driver.submit(request(2, prompt=12, output=12))
    driver.drain()
    assert statistics(driver.core)["num_preemptions"] > 0
    tokens = tuple(driver.callers[1].tokens[:9])
    driver.submit(request(3, tokens=driver.callers[1].request.prompt, output=12, done=tokens))
    driver.drain()
    first = driver.callers[3].first
    assert first is not None
    assert first.index == 9  # numbering goes on
    assert len(driver.callers[3].tokens) == 12  # max_tokens counts the earlier life


def test_a_group_computes_its_prompt_once() -> None:
    driver = Driver(config())
    for number in (1, 2, 3):
        driver.submit(request(number, tokens=tuple(range(10)), output=3, group="g", arrival_s=0.0))
    driver.drain()
    computed = sum(part.num_tokens for plan in driver.plans for part in plan.named_slices)
    assert computed == 10 + 2 * 1 + 3 * 2  # the prompt, the followers' last token, decodes
    copies = [pair for plan in driver.plans for pair in plan.copies]
    assert len(copies) == 2  # each follower its own third block
    assert driver.callers[2].first is not None
    assert driver.callers[2].first.num_cached_tokens == 9
    driver.check_everyone_finished()


def test_a_group_outlives_its_leader() -> None:
    driver = Driver(config(token_budget=4))
    for number in (1, 2, 3):
        driver.submit(request(number, tokens=tuple(range(10)), output=3, group="g", arrival_s=0.0))
    driver.answer()
    driver.abort(1)
    driver.drain()
    assert [driver.callers[n].finish for n in (1, 2, 3)] == [
        FinishReason.ABORT,
        FinishReason.LENGTH,
        FinishReason.LENGTH,
    ]
    driver.check_everyone_finished()


def test_a_request_preempted_and_started_again_lacks_nothing_and_blocks_none() -> None:
    size = 64
    driver = Driver(
        config(
            num_blocks=6, block_size=size, max_model_len=6 * size, max_step_tokens=12 * size,
            token_budget=12 * size, watermark=0.0, swap="never", lookahead=True,
        )
    )  # fmt: skip
    driver.submit(request(1, prompt=size - 14, output=2 * size + 20))
    driver.submit(request(2, prompt=size - 2, output=4 * size - 64))
    states = driver.core.requests.by_id
    second = states[2]
    while not (second.num_preemptions and second.status is RequestStatus.RUNNING):
        driver.answer()
    driver.submit(request(3, output=3))
    for _ in range(3):
        driver.answer()
    assert states[3].status is RequestStatus.RUNNING
    driver.drain()
    driver.check_everyone_finished()


def test_a_prefix_cached_meanwhile_lets_in_a_request_refused_memory() -> None:
    tokens = tuple(i % 7 for i in range(160))
    driver = Driver(
        config(
            num_blocks=47, max_model_len=180, max_step_tokens=180, token_budget=64,
            watermark=0.0, prefix_cache=True,
        )
    )  # fmt: skip
    driver.submit(request(1, tokens=tokens, output=20))
    driver.submit(request(2, tokens=(*tokens, 3), output=5))
    assert driver.core.requests.by_id[2].status is RequestStatus.WAITING
    while not driver.core.requests.decoding:
        driver.answer()
    driver.answer()
    assert driver.core.requests.by_id[2].status is RequestStatus.RUNNING
    driver.drain()
    driver.check_everyone_finished()


def test_what_a_waiting_request_would_share_is_what_running_ones_hold() -> None:
    """The answer is remembered: each way in which it grows or shrinks."""
    settings = config(block_size=4, num_blocks=40, watermark=0.0, prefix_cache=True)
    requests, tokens = LiveRequests(settings, "fcfs", None), tuple(range(17))
    first, second, asking = (
        RequestState(request(number, tokens=tokens), number, max_model_len=64)
        for number in (1, 2, 3)
    )
    for state in (first, second, asking):
        requests.add(state)

    def start(state: RequestState) -> None:
        assert requests.start(state, 64, reserve=False)
        state.num_computed_tokens = state.num_tokens
        requests.running.to_decoding(state)

    start(first)
    assert requests.num_held_of(3) == 0  # nothing is computed
    requests.running.commit(first, 9)
    assert requests.num_held_of(3) == 8
    requests.running.commit(first, 17)
    assert requests.num_held_of(3) == 16
    start(second)
    requests.end(first)
    assert requests.num_held_of(3) == 16  # the second holds them
    second.in_flight = 1
    requests.end(second)
    assert second.status is RequestStatus.FINISHING
    assert requests.num_held_of(3) == 0  # they will be free
    assert requests.num_free_blocks < settings.num_blocks


_MEMORY = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(5, 7),
        "watermark": st.sampled_from([0.0, 0.0, 0.2]),
        "allocation": st.sampled_from(["prompt", "chunk"]),
        "prefix_cache": st.sampled_from([True, True, True, False]),
    }
)
_COMPUTED = st.lists(  # prompts of few kinds, which share prefixes, and what becomes of each
    st.tuples(
        st.tuples(st.sampled_from([1, 1, 2]), st.integers(5, 20)).map(
            lambda drawn: tuple(i * drawn[0] % 5 for i in range(drawn[1]))
        ),
        st.sampled_from(["stays", "leaves", "leaves", "ended"]),
    ),
    min_size=4,
    max_size=6,
)


def computed(
    settings: dict[str, Any], prompts: list[tuple[tuple[int, ...], str]], groups: bool = False
) -> tuple[LiveRequests, RequestState, list[RequestState]]:
    """As many of these as fit, those that are to leave, and the last one, which waits. groups:
    equal prompts are of one."""
    requests = LiveRequests(config(max_model_len=20, swap="never", **settings), "fcfs", None)
    leaving = list[RequestState]()
    for number, (prompt, fate) in enumerate(prompts):
        group = str(prompt) if groups else None
        state = RequestState(request(number, tokens=prompt, group=group), number, max_model_len=20)
        requests.add(state)
        if number == len(prompts) - 1:
            break
        has_started = requests.head() is state and requests.start(state, 64, reserve=False)
        if has_started:
            state.num_computed_tokens = state.num_tokens
            requests.running.to_decoding(state)
            requests.waiting.prompt_done(state, 0.0)
            if settings["prefix_cache"]:
                requests.running.commit(state, state.num_tokens)
        if not has_started or fate == "ended":
            requests.end(state)
        elif fate == "leaves":
            leaving.append(state)
    return requests, state, leaving


@given(_MEMORY, _COMPUTED, st.integers(1, 20), st.booleans())
def test_what_could_start_without_others_starts_once_they_are_preempted(
    settings: dict[str, Any],
    prompts: list[tuple[tuple[int, ...], str]],
    chunk: int,
    reserve: bool,
) -> None:
    requests, state, leaving = computed(settings, prompts)
    could = requests.running.could_start(state, chunk, reserve, leaving)
    for other in leaving:
        requests.preempt(other)
    assert requests.running.start(state, chunk, reserve, None) == could


@given(_MEMORY, _COMPUTED, st.booleans(), st.booleans())
def test_who_starts_takes_no_memory_for_what_it_was_said_to_share(
    settings: dict[str, Any],
    prompts: list[tuple[tuple[int, ...], str]],
    groups: bool,
    cacheable: bool,
) -> None:
    requests, state, _ = computed(settings, prompts, groups)
    state.cacheable &= cacheable
    num_held, num_free = requests.num_held_of(state.request_id), requests.num_free_blocks
    if requests.running.start(state, 64, False, requests.waiting.donor(state)):
        taken = num_free - requests.num_free_blocks
        assert taken == len(state.block_table) - num_held // requests.block_size
