"""After `ResetPrefixCache` no request finds what was computed before, and nobody loses a token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from actors.scheduling.event_log import check_replay, config_row, to_row
from actors.scheduling.events import ClearTier, ResetPrefixCache, TierHolds
from actors.scheduling.state import RequestStatus
from actors.scheduling.statistics import statistics
from tests.actors.scheduling import short_lives
from tests.actors.scheduling.driver import Driver
from tests.actors.scheduling.short_lives import request

COSTS = {"name": "toy", "tokens_s": [[1, 0.010], [64, 0.042]], "per_request_s": 0.0001}
PROMPT = tuple(i % 5 for i in range(13))
STATES = {"num_saved_states": 2, "swap": "never", "drafter": "none"}


def config(**changes: Any) -> Any:
    base = short_lives.config(prefix_cache=True, watermark=0.0, max_model_len=80)
    return replace(base, **changes)


def num_found(driver: Driver, number: int, prompt: tuple[int, ...] = PROMPT) -> int:
    """Tokens of a prompt that are found in the cache; all others are answered as well."""
    driver.submit(request(number, tokens=prompt, output=1))
    driver.drain()
    first = driver.callers[number].first
    assert first is not None
    return first.num_cached_tokens


def finish(driver: Driver) -> None:
    driver.drain()
    driver.check_everyone_finished()
    rows = [config_row(driver.config), *(to_row(*each) for each in driver.log)]
    assert check_replay(rows) == len(rows)


@pytest.mark.parametrize("states", [{}, STATES])
def test_what_is_cached_is_forgotten_and_cached_anew(states: dict[str, Any]) -> None:
    driver = Driver(config(**states))
    manager = driver.core.requests.running.block_manager
    assert [num_found(driver, number) for number in (1, 2)] == [0, 12]
    manager.pop_changes()
    driver.send(ResetPrefixCache())
    assert (manager.num_cached, manager.findable()) == (0, [])
    assert manager.pop_changes() == (True, [], []), "fronts learn it"
    assert [num_found(driver, number) for number in (3, 4)] == [0, 12]
    finish(driver)


@pytest.mark.parametrize("states", [{}, STATES])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_stream_keeps_its_blocks_and_shares_none(states: dict[str, Any], num_stages: int) -> None:
    """Nor those that it completes later: they follow from what was computed before."""
    driver = Driver(config(token_budget=16, num_stages=num_stages, **states))
    asked = request(1, prompt=33, output=20)
    driver.submit(asked)
    driver.answer()
    driver.send(ResetPrefixCache())
    assert driver.core.live_requests[1].status is RequestStatus.RUNNING
    assert num_found(driver, 2, asked.prompt + (1,) * 17) == 0
    finish(driver)
    whole = (*asked.prompt, *driver.callers[1].tokens)
    # Those that the second one computed; no state of so few of them has been saved.
    assert num_found(driver, 3, whole) == (0 if states else 32)
    finish(driver)


@pytest.mark.parametrize("num_answered", [1, 2])
def test_states_are_forgotten_though_their_blocks_are_computed_again(num_answered: int) -> None:
    """Of a prompt that ended, and of one whose last chunk is planned, or is not, at the reset."""
    driver = Driver(config(token_budget=16, **STATES))
    num_found(driver, 1)
    asked = request(2, prompt=53)
    driver.submit(asked)
    for _ in range(num_answered):
        driver.answer()
    driver.send(ResetPrefixCache())
    finish(driver)
    for number, prompt in ((3, PROMPT), (5, asked.prompt)):
        assert num_found(driver, number, (*prompt, 1, 2, 3, 4)) == 0
        assert num_found(driver, number + 1, prompt) == 0
    finish(driver)


def test_a_member_of_a_group_that_begins_later_shares_none_either() -> None:
    driver = Driver(config(max_requests=2))
    asked = request(1, prompt=13, output=12)
    for number in (1, 2):
        driver.submit(replace(asked, request_id=number, group="g"))
    while not driver.callers[1].tokens:
        driver.answer()
    driver.send(ResetPrefixCache())
    driver.submit(replace(asked, request_id=3, group="g"))
    while 3 not in {start.request_id for plan in driver.plans for start in plan.started}:
        driver.answer()
    finish(driver)
    assert num_found(driver, 4, asked.prompt) == 0


def test_what_was_swapped_out_is_not_shared_when_it_is_back() -> None:
    driver = Driver(config(num_blocks=12, num_host_blocks=20, swap="always", watermark=0.0))
    asked = [request(number, prompt=15, output=20) for number in (1, 2)]
    for one in asked:
        driver.submit(one)
    second = driver.core.live_requests[2]
    while not second.host_blocks:
        driver.answer()
    driver.send(ResetPrefixCache())
    while second.host_blocks:
        driver.answer()
    assert second.is_private
    finish(driver)
    assert statistics(driver.core)["num_preemptions"] > 0
    assert [num_found(driver, 2 + one.request_id, one.prompt) for one in asked] == [0, 0]


def test_one_that_begins_again_computes_what_it_may_share() -> None:
    driver = Driver(config())
    asked = request(1, prompt=13, output=8)
    driver.submit(asked)
    driver.answer()
    driver.send(ResetPrefixCache())
    driver.lose()
    finish(driver)
    assert num_found(driver, 2, asked.prompt) == 12


# ---- the second tier --------------------------------------------------------------------------


def with_tier() -> Any:
    return config(tier_ranks=2, cost_model=COSTS)


def test_what_is_stored_is_deleted() -> None:
    driver = Driver(with_tier())
    num_found(driver, 1)
    assert statistics(driver.core)["num_tier_blocks"] == 3
    driver.send(ResetPrefixCache())
    assert [type(move) for move in driver.moves] == [ClearTier]
    driver.submit(request(2, tokens=PROMPT, output=1))
    assert [type(move) for move in driver.moves] == [ClearTier], "nothing that goes is fetched"
    finish(driver)
    assert driver.callers[2].first.num_cached_tokens == 0  # type: ignore[union-attr]
    assert statistics(driver.core)["num_tier_blocks"] == 3, "of the second request"
    restarted = Driver(with_tier())
    restarted.stages.stores = driver.stages.stores
    restarted.send(TierHolds(driver.stages.stores.restart()))
    assert num_found(restarted, 3) == 12


def test_a_save_under_way_is_deleted_behind_it() -> None:
    driver = Driver(with_tier())
    driver.submit(request(1, tokens=PROMPT, output=1))
    while not driver.moves:
        driver.answer()
    driver.send(ResetPrefixCache())
    driver.answer_move()
    assert driver.core.tier is not None
    assert driver.core.tier.contents.is_empty, "what was saved meanwhile goes, too"
    finish(driver)
    assert statistics(driver.core)["num_tier_blocks"] == 0


def test_what_is_being_fetched_is_not_used() -> None:
    before = Driver(with_tier())
    num_found(before, 1)
    driver = Driver(with_tier())
    driver.stages.stores = before.stages.stores
    driver.send(TierHolds(driver.stages.stores.restart()))
    driver.submit(request(2, tokens=PROMPT, output=1))
    driver.send(ResetPrefixCache())
    finish(driver)
    assert driver.callers[2].first.num_cached_tokens == 0  # type: ignore[union-attr]


def test_stages_that_are_lost_before_it_is_deleted_delete_what_they_find() -> None:
    driver = Driver(with_tier())
    num_found(driver, 1)
    driver.send(ResetPrefixCache())
    driver.lose()
    assert [type(move) for move in driver.moves] == [ClearTier]
    assert num_found(driver, 2) == 0
    finish(driver)
