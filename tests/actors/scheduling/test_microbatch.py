"""Micro-batches of equal work: the longest wait goes first, and contexts are mixed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.scheduling.lifecycle import LiveRequests
from actors.scheduling.microbatch import decode_share, prefill_share, spread
from actors.scheduling.state import RequestState
from tests.actors.scheduling.driver import Driver
from tests.actors.scheduling.short_lives import config, request


def decode(number: int, context: int, step_id: int) -> RequestState:
    state = RequestState(request(number, prompt=context), number, max_model_len=200)
    state.step_id = step_id
    return state


READY = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 3)), min_size=1, max_size=12)


@given(READY, st.integers(0, 12))
def test_the_chosen_have_waited_longest_and_keep_their_order(
    lives: list[tuple[int, int]], count: int
) -> None:
    ready = [decode(number, *life) for number, life in enumerate(lives)]
    chosen = spread(ready, count)
    assert len(chosen) == min(count, len(ready))
    assert chosen == [state for state in ready if state in chosen]
    left = [state.step_id for state in ready if state not in chosen]
    assert not left or not chosen or max(state.step_id for state in chosen) <= min(left)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 12))
def test_of_equals_every_range_of_contexts_gives_one(contexts: list[int], count: int) -> None:
    ready = [decode(number, context, 5) for number, context in enumerate(contexts)]
    chosen = sorted(state.num_tokens for state in spread(ready, count))
    ranked, count = sorted(contexts), min(count, len(contexts))
    for k, context in enumerate(chosen):
        begin, end = k * len(ranked) // count, -(-(k + 1) * len(ranked) // count)
        assert context in ranked[begin:end]


@given(st.integers(1, 12), st.integers(1, 5))
def test_no_request_is_skipped_for_a_whole_round(num_requests: int, depth: int) -> None:
    ready = [decode(number, 1 + number, -1) for number in range(num_requests)]
    share = -(-num_requests // depth)
    for step_id in range(5 * depth):
        for state in spread(ready, share):
            state.step_id = step_id
        assert min(state.step_id for state in ready) > step_id - depth or step_id < depth - 1


def test_shares_cover_everything_that_can_be_computed() -> None:
    requests = LiveRequests(config(max_requests=40, num_blocks=200), "fcfs", None)
    for number in range(7):
        state = decode(number, 4, -1)
        requests.add(state)
        assert requests.start(state, 64, reserve=False)
        requests.running.to_decoding(state)
    assert [decode_share(requests, depth) for depth in (1, 2, 3, 8)] == [7, 4, 3, 1]
    assert prefill_share(requests, 2, 4) == 36  # a chunk of fewer than 32 tokens is not worth it
    unfinished = RequestState(request(8, prompt=60), 8, max_model_len=200)
    requests.add(unfinished)
    assert requests.start(unfinished, 64, reserve=False)
    unfinished.num_computed_tokens = 12
    requests.add(RequestState(request(9, prompt=64), 9, max_model_len=200))
    assert prefill_share(requests, 2, 4) == 60  # of 48 unfinished, 64 waiting and 7 decodes
    assert prefill_share(requests, 2, 30) == 62
    assert prefill_share(requests, 3, 4) == 40


def test_a_lone_prompt_is_cut_into_steps_of_one_size() -> None:
    settings = config(
        num_stages=2,
        micro_batches="uniform",
        token_budget=256,
        max_step_tokens=256,
        max_model_len=256,
        num_blocks=100,
    )
    driver = Driver(settings)
    driver.submit(request(0, prompt=240))
    driver.drain()
    assert [plan.num_tokens for plan in driver.plans if plan.num_tokens > 1] == [120, 120]


def test_uniform_micro_batches_share_decodes_and_prompts() -> None:
    """Eight requests over two stages: the largest step tells how long the other stage waits."""

    def largest_steps(micro_batches: str) -> list[int]:
        driver = Driver(
            config(
                num_blocks=200,
                num_stages=2,
                micro_batches=micro_batches,
                token_budget=64,
                max_requests=8,
            )
        )
        driver.submit(request(0, prompt=4, output=40))
        for number in range(1, 8):
            driver.submit(request(number, prompt=4, output=40))
        for _ in range(40):
            driver.answer()
        sizes = [plan.num_tokens for plan in driver.plans[-10:]]
        driver.drain()
        return sorted(sizes)

    assert largest_steps("uniform") == [4] * 10
    assert largest_steps("greedy") == [1] * 5 + [7] * 5
