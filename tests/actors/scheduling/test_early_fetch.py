"""What is fetched before its stream comes: in turn, within bounds, and not for ever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from actors.scheduling.early_fetch import MOST_AT_ONCE, EarlyFetches
from actors.scheduling.event_log import check_replay, config_row, to_row
from actors.scheduling.events import FetchEarly, Moved, TierHolds
from actors.scheduling.request import Request, SamplingParams
from actors.scheduling.state import prefix_digests
from tests.actors.scheduling.driver import Driver
from tests.actors.scheduling.test_second_tier import (
    begun,
    config,
    fetches,
    finish,
    request,
    saved_elsewhere,
    saves,
)

SHARED = config(tier_shared=True)


def names(count: int) -> list[bytes]:
    return [bytes([number]) for number in range(count)]


def take(early: EarlyFetches, room: int = 100, known: Sequence[bytes] = ()) -> list[bytes]:
    return early.take(known.__contains__, room, 0.0)


def test_pieces_come_in_the_order_in_which_they_were_told() -> None:
    early = EarlyFetches()
    early.add(names(MOST_AT_ONCE + 3), 0.0, 100)
    assert take(early) == names(MOST_AT_ONCE)
    assert take(early) == names(MOST_AT_ONCE + 3)[MOST_AT_ONCE:]
    assert take(early) == []


def test_what_is_here_or_coming_is_dropped() -> None:
    early = EarlyFetches()
    early.add(names(4), 0.0, 100)
    assert take(early, known=names(2)) == names(4)[2:]
    assert not early.is_wanted


def test_blocks_settle_as_they_come_or_are_given_up() -> None:
    early = EarlyFetches()
    early.add(names(4), 0.0, 100)
    early.add(names(5), 0.0, 100)
    take(early, room=2, known=names(1))
    assert [early.wants(name) for name in names(5)] == [False] * 3 + [True] * 2
    early.add([b"more"], 0.0, 2)
    assert not early.wants(names(5)[3]), "the oldest are dropped"
    assert early.wants(b"more")
    early.clear()
    assert not early.is_wanted
    assert not early.wants(b"more")


def test_the_last_blocks_of_a_stream_go_before_those_of_others() -> None:
    early = EarlyFetches()
    early.add(names(30), 0.0, 100)
    early.add([b"last", *names(30)[28:]], 0.0, 100, is_last=True)
    early.add(names(30), 0.0, 100)
    assert early.wants(b"last")
    rest = names(28)
    assert take(early) == [b"last", *names(30)[28:], *rest[: MOST_AT_ONCE - 3]]
    assert take(early) == rest[MOST_AT_ONCE - 3 :]
    assert not early.is_wanted


def test_others_that_fill_their_room_leave_some_for_last_blocks() -> None:
    early = EarlyFetches()
    early.add(names(9), 0.0, 100)
    assert take(early, room=4) == names(4)
    early.add([b"a", b"b", b"c", b"d", b"e"], 0.0, 100, is_last=True)
    assert take(early, room=4) == [b"a", b"b", b"c", b"d"], "all that is free"
    assert take(early, room=4) == []


def test_what_no_stream_has_asked_for_fills_its_room_only() -> None:
    early = EarlyFetches()
    early.add(names(9), 0.0, 100)
    assert take(early, room=6) == names(6)
    assert take(early, room=6) == []
    early.claimed(names(2))
    assert take(early, room=6) == names(8)[6:]
    assert take(early, room=-1) == []


def test_a_stream_that_does_not_come_is_forgotten() -> None:
    early = EarlyFetches()
    early.add(names(6), 0.0, 100)
    assert early.take(lambda d: False, 3, 5.0) == names(3)
    early.add([b"new"], 11.0, 100)
    assert early.take(lambda d: False, 3, 11.0) == [b"new"], "neither fills room nor is fetched"
    assert early.num_unclaimed == 1


def test_no_more_are_remembered_than_memory_has_blocks() -> None:
    early = EarlyFetches()
    early.add(names(9), 0.0, 4)
    assert take(early) == names(9)[5:]


# ---- in the core ------------------------------------------------------------------------------


def told(
    driver: Driver, of: Request, begin: int = 0, end: int | None = None, is_last: bool = False
) -> None:
    """A peer has saved these blocks of the prompt."""
    digests = prefix_digests(of.prompt, driver.config.block_size, of.cache_salt)[begin:end]
    driver.send(FetchEarly(tuple(digests), is_last))


def num_coming(driver: Driver, of: Request) -> int:
    """Blocks of the prompt for which a peer would wait."""
    assert driver.core.tier is not None
    digests = prefix_digests(of.prompt, driver.config.block_size, of.cache_salt)
    return sum(map(driver.core.tier.is_coming, digests))


def replays(driver: Driver) -> bool:
    rows = [config_row(driver.config), *[to_row(*call) for call in driver.log]]
    return check_replay(rows) == len(rows)


def test_blocks_are_here_before_their_stream_comes() -> None:
    plain, resumed = begun(1)
    driver = Driver(SHARED)
    saved_elsewhere(driver, plain)
    for begin, end in ((0, 3), (3, 5), (5, 7)):
        told(driver, plain, begin, end)
    assert [len(fetch.blocks) for fetch in fetches(driver)] == [3, 2], "two at a time"
    assert num_coming(driver, plain) == 7
    for num_left in (4, 2, 0):
        driver.answer_move(after_s=0.001)
        assert num_coming(driver, plain) == num_left
    assert [len(fetch.blocks) for fetch in fetches(driver)] == [3, 2, 2]
    assert driver.core.view.num_free_blocks == SHARED.num_blocks, "evictable"
    driver.submit(resumed)
    assert driver.plans[0].named_slices[0].start == 28, "at once, without another fetch"
    assert len(fetches(driver)) == 3
    finish(driver)
    assert not saves(driver)[1:], "what a peer has saved is not saved again"
    assert replays(driver)


def test_a_streams_last_block_comes_before_the_whole_of_the_next() -> None:
    """Its fetch is the next one, behind those under way."""
    plain, _ = begun(1)
    long, _ = begun(2, kind=3, length=300)
    driver = Driver(replace(SHARED, num_blocks=400, max_model_len=400))
    saved_elsewhere(driver, plain, long)
    told(driver, plain, 0, 6)
    driver.answer_move(after_s=0.001)
    told(driver, long)
    told(driver, plain, is_last=True)
    num_before = 0
    while num_coming(driver, plain):
        num_before += len(driver.moves[0].blocks)
        driver.answer_move(after_s=0.001)
    assert num_before == 2 * MOST_AT_ONCE + MOST_AT_ONCE, "two fetches of the other, of 75 blocks"
    finish(driver)
    assert replays(driver)


def test_a_stream_that_comes_meanwhile_fetches_the_rest_behind_it() -> None:
    plain, resumed = begun(1)
    driver = Driver(SHARED)
    saved_elsewhere(driver, plain)
    told(driver, plain, 0, 4)
    driver.submit(resumed)
    assert [len(fetch.blocks) for fetch in fetches(driver)] == [4, 3], "without an answer between"
    assert not driver.outstanding
    driver.answer_move()
    assert not driver.outstanding
    driver.answer_move()
    assert driver.plans[0].named_slices[0].start == 28
    assert len(fetches(driver)) == 2
    finish(driver)
    assert replays(driver)


def test_a_stream_waits_for_a_fetch_that_has_all_it_lacks() -> None:
    plain, resumed = begun(1)
    driver = Driver(SHARED)
    saved_elsewhere(driver, plain)
    told(driver, plain)
    driver.submit(resumed)
    assert [len(fetch.blocks) for fetch in fetches(driver)] == [7]
    driver.answer_move()
    assert driver.plans[0].named_slices[0].start == 28
    finish(driver)


def test_what_does_not_come_early_is_computed_after_one_more_try() -> None:
    for order in (0, 1):
        plain, resumed = begun(1)
        driver = Driver(SHARED)
        saved_elsewhere(driver, plain)
        told(driver, plain, 0, 4)
        driver.submit(resumed)
        for store in driver.stages.stores.ranks:
            store.pop(prefix_digests(plain.prompt, 4)[1])
        driver.answer_move(which=order)
        driver.answer_move()
        while driver.moves:
            driver.answer_move()
        assert driver.plans[0].named_slices[0].start == 4
        finish(driver)
        assert len(fetches(driver)) <= 3
        assert replays(driver)


def test_a_stream_that_waits_for_an_early_fetch_fetches_what_of_that_did_not_come() -> None:
    plain, resumed = begun(1)
    for end in (7, 9):  # all of what it lacks, and more
        driver = Driver(SHARED)
        saved_elsewhere(driver, plain)
        told(driver, plain, 0, end)
        driver.submit(resumed)
        missing = prefix_digests(plain.prompt, 4)[3]
        kept = [store.pop(missing) for store in driver.stages.stores.ranks]
        (early,) = driver.moves
        driver.answer_move(after_s=0.001)
        assert len(early.blocks) == 7
        assert [len(fetch.blocks) for fetch in fetches(driver)] == [7, 4]
        for store, block in zip(driver.stages.stores.ranks, kept, strict=True):
            store[missing] = block
        driver.answer_move()
        assert driver.plans[0].named_slices[0].start == 28
        finish(driver)
        assert replays(driver)


def test_no_block_is_fetched_twice_at_a_time() -> None:
    """A stream that lacks what is in front of them fetches that, then waits for those that come."""
    for which in (0, 1):
        plain, resumed = begun(1)
        driver = Driver(SHARED)
        saved_elsewhere(driver, plain)
        told(driver, plain, 2, 5)
        driver.submit(resumed)
        assert [len(fetch.blocks) for fetch in fetches(driver)] == [3, 2]
        driver.answer_move(which)
        while driver.moves:
            driver.answer_move()
        assert [len(fetch.blocks) for fetch in fetches(driver)] == [3, 2, 2]
        assert driver.plans[0].named_slices[0].start == 28
        finish(driver)
        assert replays(driver)


def test_nobody_is_preempted_for_memory_that_a_fetch_holds() -> None:
    plain, _ = begun(1)
    driver = Driver(replace(SHARED, num_blocks=12))
    saved_elsewhere(driver, plain)
    told(driver, plain)
    (fetch,) = fetches(driver)
    assert len(fetch.blocks) == 6
    driver.submit(request(2, kind=5, length=20, sampling=SamplingParams(max_tokens=4)))
    driver.submit(request(3, kind=3, length=30, arrival_s=0.0, num_losses=1))  # a suspect, first
    while driver.outstanding:
        driver.answer()
    assert driver.callers[2].finish is not None
    assert driver.core.num_preemptions == 0
    finish(driver)
    assert replays(driver)


def test_the_blocks_before_stay_while_the_rest_is_fetched() -> None:
    """Though others need memory: what was fetched early is held for its stream."""
    plain, resumed = begun(1)
    settings = replace(SHARED, num_blocks=14)
    driver = Driver(settings)
    saved_elsewhere(driver, plain)
    told(driver, plain, 0, 4)
    driver.submit(resumed)
    driver.answer_move()
    driver.submit(request(2, kind=5, length=26))
    while driver.outstanding:
        driver.answer()
    driver.answer_move()
    parts = [part for plan in driver.plans for part in plan.named_slices if part.request_id == 1]
    assert parts[0].start == 28
    finish(driver)


def test_running_requests_have_memory_first() -> None:
    plain, _ = begun(1)
    driver = Driver(replace(SHARED, num_blocks=12))
    saved_elsewhere(driver, plain)
    driver.submit(request(2, kind=5, length=24, sampling=SamplingParams(max_tokens=20)))
    told(driver, plain)
    (fetch,) = fetches(driver)
    assert len(fetch.blocks) == 3, "half of the 6 that it leaves"
    driver.answer_move()
    while driver.outstanding:
        driver.answer()
    assert driver.core.num_preemptions == 0
    finish(driver)


def test_a_request_that_waits_for_memory_goes_first() -> None:
    plain, _ = begun(1)
    driver = Driver(replace(SHARED, num_blocks=12))
    saved_elsewhere(driver, plain)
    driver.submit(request(2, kind=5, length=24, sampling=SamplingParams(max_tokens=20)))
    driver.submit(request(3, kind=3, length=30))
    driver.answer()
    driver.answer()
    told(driver, plain)
    assert not fetches(driver)
    finish(driver)


def test_lost_stages_forget_it() -> None:
    plain, resumed = begun(1)
    driver = Driver(SHARED)
    saved_elsewhere(driver, plain)
    told(driver, plain, 0, 4)
    driver.submit(resumed)
    told(driver, plain, 4)
    driver.lose()
    assert num_coming(driver, plain) == 0, "no peer waits for it"
    finish(driver)
    assert replays(driver)


def test_it_is_known_as_work_beside_steps() -> None:
    plain, _ = begun(1)
    driver = Driver(replace(SHARED, pipeline_depth=1))
    saved_elsewhere(driver, plain)
    driver.submit(request(2, kind=5, length=4, sampling=SamplingParams(max_tokens=9)))
    driver.answer()
    told(driver, plain)
    driver.answer()
    (step,) = driver.core.in_flight
    assert step.shape.beside_move
    finish(driver)


def test_it_is_ignored_where_nothing_is_shared() -> None:
    for settings in (config(), config(tier_ranks=0), config(prefix_cache=False)):
        driver = Driver(settings)
        if settings.tier_ranks and settings.prefix_cache:
            driver.send(TierHolds(((), ())))
        told(driver, request(1))
        assert not fetches(driver)
        assert driver.core.is_idle


def test_a_fetch_dearer_than_computing_is_not_made_early() -> None:
    plain, _ = begun(1)
    other, _ = begun(2, kind=1)
    driver = Driver(SHARED)
    saved_elsewhere(driver, plain, other)
    told(driver, plain)
    driver.answer_move(after_s=5.0)
    assert isinstance(driver.log[-1][1], Moved)
    told(driver, other)
    assert len(fetches(driver)) == 1
    assert num_coming(driver, other) == 0, "whoever waits for them waits no longer"
    finish(driver)
