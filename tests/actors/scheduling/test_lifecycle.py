"""A request between the waiting queue and the running requests: every way, and what it holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.scheduling.lifecycle import LiveRequests
from actors.scheduling.state import Fate, RequestState, RequestStatus, Suspicion
from tests.actors.scheduling.driver import Driver
from tests.actors.scheduling.short_lives import config, request

NUM_BLOCKS, BLOCK_SIZE = 8, 4


@pytest.fixture
def requests() -> LiveRequests:
    settings = config(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, watermark=0.0)
    return LiveRequests(settings, "fcfs", None)


def _add(requests: LiveRequests, number: int, prompt: int = 8, priority: int = 0) -> RequestState:
    made = replace(request(number, prompt=prompt, priority=priority), arrival_s=float(number))
    state = RequestState(made, number, max_model_len=64)
    requests.add(state)
    return state


def _start(requests: LiveRequests, state: RequestState) -> None:
    assert requests.waiting.head(0.0) is state
    assert requests.start(state, 64, reserve=False)
    state.num_computed_tokens = state.num_tokens
    requests.running.to_decoding(state)


def test_from_waiting_to_the_end(requests: LiveRequests) -> None:
    state = _add(requests, 1)
    assert (state.status, requests.num_waiting) == (RequestStatus.WAITING, 1)
    assert requests.knows(1)
    _start(requests, state)
    assert state.status is RequestStatus.RUNNING
    assert len(state.block_table) == 2
    assert requests.num_free_blocks == NUM_BLOCKS - 2
    requests.end(state)
    assert state.status is RequestStatus.ENDED
    assert not requests.knows(1)
    assert requests.num_free_blocks == NUM_BLOCKS


def test_blocks_that_prompts_will_need_are_not_spared(requests: LiveRequests) -> None:
    assert requests.can_spare(NUM_BLOCKS)
    assert not requests.can_spare(NUM_BLOCKS + 1)
    state = _add(requests, 1, prompt=8)  # two blocks, and one for what does not fill one
    assert requests.can_spare(NUM_BLOCKS - 3)
    assert not requests.can_spare(NUM_BLOCKS - 2)
    _start(requests, state)
    assert requests.can_spare(NUM_BLOCKS - 2)
    _add(requests, 2, prompt=8, priority=-1)  # beside a live one it yields
    assert requests.can_spare(NUM_BLOCKS - 2)
    requests.end(state)
    assert not requests.can_spare(NUM_BLOCKS - 2)


def test_blocks_stay_while_a_step_in_flight_uses_them(requests: LiveRequests) -> None:
    state = _add(requests, 1)
    _start(requests, state)
    state.in_flight = 1
    requests.end(state)
    assert state.status is RequestStatus.FINISHING
    assert requests.running.num_slots_taken == 1
    assert requests.num_free_blocks == NUM_BLOCKS - 2
    state.in_flight = 0
    requests.drained(state)
    assert state.status is RequestStatus.ENDED
    assert requests.num_free_blocks == NUM_BLOCKS


def test_preemption_keeps_tokens_and_gives_up_blocks(requests: LiveRequests) -> None:
    state = _add(requests, 1)
    _start(requests, state)
    state.output_token_ids.append(9)
    state.num_tokens += 1
    requests.preempt(state)
    assert state.status is RequestStatus.WAITING
    assert state.num_computed_tokens == 0
    assert state.output_token_ids == [9]
    assert (requests.num_waiting, requests.num_waiting_tokens) == (1, 9)
    assert requests.num_free_blocks == NUM_BLOCKS
    assert requests.num_preemptions == 1


def test_growing_preempts_the_worst_rank_and_never_a_better_one(requests: LiveRequests) -> None:
    first, second = _add(requests, 1), _add(requests, 2, prompt=20)
    _start(requests, first)
    _start(requests, second)
    assert requests.num_free_blocks == 1
    assert requests.grow(second, 28, step_id=0) is None  # only a better rank could give
    assert requests.running.claimant is second
    assert requests.grow(first, 16, step_id=0) is not None
    assert second.status is RequestStatus.WAITING
    assert len(first.block_table) == 4


def test_a_suspect_waits_for_its_trial_and_an_end_overrides_it(
    requests: LiveRequests,
) -> None:
    suspect, ended = _add(requests, 1), _add(requests, 2)
    _start(requests, suspect)
    _start(requests, ended)
    for state in (suspect, ended):
        state.in_flight = 1
        state.suspicion = Suspicion()
        requests.stop(state, Fate.QUEUE)
    requests.end(ended)
    for state in (suspect, ended):
        state.in_flight = 0
        requests.drained(state)
    assert suspect.status is RequestStatus.WAITING
    assert requests.num_waiting == 1
    assert requests.waiting.head(0.0) is None
    assert ended.status is RequestStatus.ENDED


def test_the_end_of_a_waiting_request_frees_its_tenants_turn(requests: LiveRequests) -> None:
    state = _add(requests, 1)
    requests.end(state)
    assert state.status is RequestStatus.ENDED
    assert requests.num_waiting == requests.num_waiting_tokens == 0
    assert requests.waiting.head(0.0) is None


def test_a_lone_prompt_ends_with_a_short_chunk_where_its_kv_leaves() -> None:
    """So that what is saved after the last token is little; never at the cost of another prompt."""
    settings = config(max_step_tokens=32, token_budget=32, last_chunk=4)
    driver = Driver(settings)
    driver.submit(request(1, prompt=40))
    driver.drain()
    assert [s[:3] for s in slices_of(driver, 1)][:3] == [(1, 0, 32), (1, 32, 4), (1, 36, 4)]
    driver.submit(request(2, prompt=7, output=1))
    driver.drain()
    assert slices_of(driver, 2) == [(2, 0, 7, True)], "a chunk for each would be too short"
    driver.submit(request(3, prompt=40, output=1))
    driver.submit(request(4, prompt=9, output=1))
    driver.drain()
    assert [s[2] for s in slices_of(driver, 3)][:2] == [32, 8]


def slices_of(driver: Driver, number: int) -> list[tuple[int, int, int, bool]]:
    return [tuple(p) for plan in driver.plans for p in plan.named_slices if p.request_id == number]
