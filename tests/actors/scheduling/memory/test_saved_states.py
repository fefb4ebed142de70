"""Rows of saved states: found by digest, the one used least recently gives way."""

from __future__ import annotations

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.memory.saved_states import SavedStates
from actors.scheduling.request import Request, SamplingParams
from actors.scheduling.state import prefix_digests
from tests.actors.scheduling.driver import Driver

A, B, C = b"a", b"b", b"c"


def saved(states: SavedStates, digest: bytes) -> int:
    row = states.save(digest)
    assert row is not None
    states.settle(row, is_saved=True)
    states.validate()
    return row


def test_the_longest_beginning_with_a_state_is_found() -> None:
    states = SavedStates(2)
    saved(states, B)
    assert states.num_blocks([A, B, C]) == 2
    assert states.num_blocks([A]) == 0
    assert states.num_blocks([]) == 0


def test_the_one_used_least_recently_gives_way() -> None:
    states = SavedStates(2)
    first, second = saved(states, A), saved(states, B)
    assert states.use(1, A) == first
    states.used(1)
    assert saved(states, C) == second
    assert states.num_blocks([B]) == 0
    assert states.save(A) is None  # it is there, and was asked for last
    assert saved(states, B) == second


def test_a_state_that_a_request_will_begin_with_stays() -> None:
    states = SavedStates(1)
    row = saved(states, A)
    states.use(1, A)
    states.use(2, A)
    assert states.save(B) is None
    states.used(1)
    assert states.save(B) is None
    states.used(2)
    assert states.save(B) == row
    assert states.num_blocks([A]) == 0  # from the plan on, not from its answer


def test_a_state_is_found_once_it_is_computed() -> None:
    states = SavedStates(2)
    row = states.save(A)
    assert row is not None
    assert states.num_blocks([A]) == 0
    assert states.save(A) is None  # another request computes it
    states.settle(row, is_saved=False)  # its step failed
    states.validate()
    assert states.num_blocks([A]) == 0
    saved(states, A)
    assert states.num_blocks([A]) == 1


def test_new_stages_have_none() -> None:
    states = SavedStates(2)
    saved(states, A)
    row = states.save(B)
    states.use(1, A)
    states.reset()
    assert row is not None
    states.settle(row, is_saved=True)
    states.validate()
    assert states.num_blocks([A]) == states.num_blocks([B]) == 0


def run(driver: Driver, *requests: Request) -> list[int]:
    """Of each, the prompt's tokens that were found."""
    for request in requests:
        driver.submit(request)
    driver.drain()
    driver.check_everyone_finished()
    firsts = [driver.callers[request.request_id].first for request in requests]
    return [first.num_cached_tokens for first in firsts if first is not None]


def asked(number: int, prompt: tuple[int, ...], **changes: object) -> Request:
    sampling = SamplingParams(max_tokens=4, seed=number)
    return Request(number, prompt, sampling, arrival_s=0.0, **changes)  # type: ignore[arg-type]


def test_prompts_begin_where_one_like_them_left_its_states() -> None:
    """At its last full block before its last token: of 4 tokens each."""
    config = SchedulerConfig(
        num_blocks=64, block_size=4, max_model_len=64, max_step_tokens=128, token_budget=6,
        budget="fixed", num_saved_states=2, swap="never", drafter="none",
    )  # fmt: skip
    driver, prompt = Driver(config), tuple(i % 5 for i in range(13))
    assert run(driver, asked(1, prompt)) == [0]
    assert run(driver, asked(2, prompt), asked(3, (*prompt, 1, 2, 3, 4, 0))) == [12, 12]
    assert run(driver, asked(4, (*prompt, 1, 2, 3, 4, 0, 1))) == [16]  # saved by the one before
    assert run(driver, asked(5, prompt[:9])) == [0]  # its blocks are there, but no state of 8
    assert run(driver, asked(6, prompt, cache_salt="other")) == [0]
    members = [asked(number, (4, *prompt), group="n") for number in (7, 8, 9)]
    assert run(driver, *members) == [0, 12, 12]


def test_states_of_a_step_that_failed_are_not_found() -> None:
    config = SchedulerConfig(
        num_blocks=64, block_size=4, max_model_len=64, max_step_tokens=128, token_budget=64,
        budget="fixed", num_saved_states=2, swap="never", drafter="none",
    )  # fmt: skip
    driver, prompt = Driver(config), tuple(i % 5 for i in range(13))
    driver.submit(asked(1, prompt))
    assert driver.outstanding[0].saved_states == ((1, 12, 0),)
    driver.fail(applied=True)
    states = driver.core.requests.running.block_manager.states
    assert states is not None
    assert states.num_blocks(prefix_digests(prompt, 4)) == 0
    driver.drain()
    driver.check_everyone_finished()
    assert states.num_blocks(prefix_digests(prompt, 4)) == 3  # of the second time
    assert run(driver, asked(2, prompt)) == [12]
