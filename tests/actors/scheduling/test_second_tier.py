"""What the core saves, fetches and does without: the second tier of the prefix cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from actors.scheduling.build import build_core
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.event_log import check_replay, config_row, to_row
from actors.scheduling.events import (
    Fetch,
    Moved,
    PipelineLost,
    Reconfigure,
    Save,
    SaveNow,
    TierHolds,
)
from actors.scheduling.plan import StepShape
from actors.scheduling.request import Request, SamplingParams
from actors.scheduling.statistics import statistics
from tests.actors.scheduling.driver import Driver

COSTS: Mapping[str, Any] = {
    "name": "toy", "tokens_s": [[1, 0.010], [64, 0.042]], "per_request_s": 0.0001,
}  # fmt: skip


def config(**changes: Any) -> SchedulerConfig:
    base = SchedulerConfig(
        num_blocks=40,
        block_size=4,
        max_requests=4,
        max_model_len=100,
        token_budget=16,
        tier_ranks=2,
        cost_model=COSTS,
        watermark=0.0,
    )
    return replace(base, **changes)


def request(number: int, kind: int = 0, length: int = 30, **changes: Any) -> Request:
    prompt = tuple((i * 7 + kind) % 10 for i in range(length))
    asked = Request(number, prompt, SamplingParams(max_tokens=3), arrival_s=float(number))
    return replace(asked, **changes)


def kept(settings: SchedulerConfig, *requests: Request) -> Driver:
    """A new engine whose stores hold what these requests have left."""
    before = Driver(settings)
    for one in requests:
        before.submit(one)
    before.drain()
    return restarted(before, settings)


def restarted(before: Driver, settings: SchedulerConfig) -> Driver:
    driver = Driver(settings)
    driver.stages.stores = before.stages.stores
    driver.send(TierHolds(driver.stages.stores.restart()))
    return driver


def fetches(driver: Driver) -> list[Fetch]:
    return [i for _, _, out in driver.log for i in out if isinstance(i, Fetch)]


def saves(driver: Driver) -> list[Save]:
    return [i for _, _, out in driver.log for i in out if isinstance(i, Save)]


def finish(driver: Driver) -> None:
    driver.drain()
    driver.check_everyone_finished()


def test_every_completed_block_is_saved_once() -> None:
    driver = Driver(config())
    driver.submit(request(1))
    finish(driver)
    driver.submit(request(2))
    finish(driver)
    digests = [digest for save in saves(driver) for _, digest in save.blocks]
    assert len(digests) == len(set(digests)) == 32 // 4
    assert statistics(driver.core)["num_tier_blocks"] == 32 // 4
    assert not fetches(driver), "what the device has is not fetched"


def test_a_returning_prompt_is_fetched_after_a_restart() -> None:
    driver = kept(config(), request(1))
    driver.submit(request(2))
    (fetch,) = fetches(driver)
    assert len(fetch.blocks) == 7, "all full blocks but that of the last known token"
    assert not driver.outstanding, "it waits"
    finish(driver)
    first = driver.callers[2].first
    assert first is not None
    assert first.num_cached_tokens == 28
    assert driver.plans[0].named_slices[0].start == 28


def test_only_what_the_device_lacks_is_fetched() -> None:
    driver = kept(config(), request(1, length=50))
    driver.submit(request(2, length=15))
    finish(driver)
    driver.submit(request(3, length=50))
    assert [len(fetch.blocks) for fetch in fetches(driver)] == [3, 12 - 3]
    finish(driver)


def test_others_go_on_meanwhile() -> None:
    driver = kept(config(), request(1))
    driver.submit(request(2))
    driver.submit(request(3, kind=3))
    while driver.outstanding:
        driver.answer()
    assert driver.callers[3].finish is not None
    assert not driver.callers[2].tokens
    finish(driver)


def test_two_that_begin_alike_wait_for_one_fetch() -> None:
    driver = kept(config(), request(1, length=60))
    driver.submit(request(2, length=40))
    driver.submit(request(3, length=60))
    assert [len(fetch.blocks) for fetch in fetches(driver)] == [9]
    driver.answer_move()
    assert [len(fetch.blocks) for fetch in fetches(driver)] == [9, 14 - 9], "and for the rest"
    finish(driver)
    assert [driver.callers[n].first.num_cached_tokens for n in (2, 3)] == [36, 56]  # type: ignore[union-attr]


@pytest.mark.parametrize("done", [0, 3])
def test_what_does_not_come_is_computed(done: int) -> None:
    driver = kept(config(), request(1))
    driver.submit(request(2))
    driver.answer_move(most=done, after_s=2.0)
    assert driver.plans[0].named_slices[0].start == 4 * done
    assert len(fetches(driver)) == 1, "it is not asked for again"
    finish(driver)


def test_a_block_counts_only_where_every_rank_has_it() -> None:
    before = Driver(config())
    before.submit(request(1))
    finish(before)
    chain = [digest for save in saves(before) for _, digest in save.blocks]
    del before.stages.stores.ranks[1][chain[2]]
    driver = restarted(before, config())
    driver.submit(request(2))
    (fetch,) = fetches(driver)
    assert [digest for _, digest in fetch.blocks] == chain[:2]
    finish(driver)


def test_salts_share_nothing() -> None:
    driver = kept(config(), request(1, cache_salt="a"))
    driver.submit(request(2, cache_salt="b"))
    driver.submit(request(3))
    assert not fetches(driver)
    finish(driver)
    driver = kept(config(), request(1, cache_salt="a"))
    driver.submit(request(2, cache_salt="a"))
    assert fetches(driver)
    finish(driver)


def test_a_fetch_dearer_than_computing_is_not_tried() -> None:
    driver = kept(config(), request(1), request(2, kind=1))
    driver.submit(request(3))
    driver.answer_move(after_s=5.0)  # 0.7 s a block, where computing all takes 0.03
    driver.submit(request(4, kind=1))
    assert len(fetches(driver)) == 1
    finish(driver)


def test_a_budget_knows_what_fits_beside_a_move() -> None:
    """Prompts give way to a stream where steps beside moves have taken twice as long."""
    settings = config(budget="adaptive", token_budget=None, tbt_s=0.06, pipeline_depth=1)
    most: dict[bool, int] = {}
    for moves in (False, True):
        driver = kept(settings, request(1))
        model = driver.core.cost_model
        assert isinstance(model, OnlineCostModel)
        for size in range(2, 64):
            shape = StepShape(1, 10, ((0, size),))
            for _ in range(20):
                model.observe(shape, model.profile.stage_s(Mix.of_shape(shape)))
                slow_s = 2 * model.profile.stage_s(Mix.of_shape(shape))
                model.observe(shape._replace(beside_move=True), slow_s)
        driver.submit(request(2, kind=5, length=4, sampling=SamplingParams(max_tokens=90)))
        while not driver.callers[2].tokens:
            driver.answer()
        if moves:
            driver.submit(request(3))
            assert len(driver.moves) == 1
        driver.submit(request(4, kind=3, length=90))
        driver.answer()
        (step,) = driver.core.in_flight
        assert step.shape.beside_move == moves
        most[moves] = step.shape.num_tokens
        finish(driver)
    assert 1 < most[True] < 0.6 * most[False]


def test_steps_are_learnt_from_as_they_were() -> None:
    """A move that begins or ends while a step runs is in its time."""
    driver = kept(config(pipeline_depth=1), request(1))
    seen: list[bool] = []
    observe = driver.core.cost_model.observe  # type: ignore[union-attr]

    def note(shape: StepShape, duration_s: float) -> None:
        seen.append(shape.beside_move)
        observe(shape, duration_s)

    driver.core.cost_model.observe = note  # type: ignore[method-assign, union-attr]
    driver.submit(request(2, kind=5, length=4, sampling=SamplingParams(max_tokens=20)))
    driver.answer()
    driver.submit(request(3))
    driver.answer()  # a fetch has begun beside it
    driver.answer_move()
    driver.answer()  # and ended
    driver.answer()
    assert seen == [False, True, True, False]
    finish(driver)


def test_beside_a_fetch_the_next_of_a_tenant_at_its_cap_starts() -> None:
    driver = kept(config(max_running_per_tenant=1), request(1))
    driver.submit(request(2, kind=5, length=4))
    driver.submit(request(3))
    driver.submit(request(4, kind=6, length=4))
    while 2 in driver.core.live_requests:
        driver.answer()
    (move,) = [move for move in driver.moves if isinstance(move, Fetch)]
    assert [start.request_id for plan in driver.outstanding for start in plan.started] == [4]
    driver.answer_move(driver.moves.index(move))
    assert 3 in driver.core.live_requests, "it waits for its turn"
    finish(driver)


@pytest.mark.parametrize("when", ["parked", "new"])
def test_a_tenants_cap_bounds_what_is_fetched_for_it_at_once(when: str) -> None:
    """Fetches hold memory, which a request of another tenant needs."""
    settings = config(max_running_per_tenant=1, num_blocks=64)
    driver = kept(settings, *(request(kind, kind=kind) for kind in range(6)))
    driver.submit(request(8, kind=8, length=4))
    if when == "new":
        driver.drain()
    for kind in range(6):
        driver.submit(request(10 + kind, kind=kind))
    while 8 in driver.core.live_requests:
        driver.answer()
    assert len(fetches(driver)) == 2, "one, and one in its place"
    driver.submit(request(9, kind=9, length=60, tenant="other"))
    assert 9 in [start.request_id for plan in driver.outstanding for start in plan.started]
    finish(driver)


@pytest.mark.parametrize("priority", [-1000, 0])
def test_fetches_of_its_tenant_keep_none_waiting_that_goes_first(priority: int) -> None:
    order = "priority" if priority == 0 else "fcfs"
    settings = config(max_running_per_tenant=1, num_blocks=64, order=order)
    driver = kept(settings, *(request(kind, kind=kind) for kind in range(3)))
    for kind in range(2):
        driver.submit(request(10 + kind, kind=kind, priority=priority))
    assert len(fetches(driver)) == 2
    driver.submit(request(9, kind=9, priority=priority + 1000))
    assert [start.request_id for start in driver.outstanding[0].started] == [9]
    finish(driver)


def test_aborted_while_it_waits() -> None:
    driver = kept(config(), request(1))
    driver.submit(request(2))
    driver.abort(2)
    assert not driver.core.requests.by_id
    finish(driver)
    driver.submit(request(3))
    assert len(fetches(driver)) == 1, "what came is in the device's cache"
    finish(driver)


def test_a_pipeline_lost_meanwhile() -> None:
    driver = kept(config(), request(1), request(2, kind=1))
    driver.submit(request(3))
    driver.submit(request(4, kind=1))
    driver.lose()
    finish(driver)
    driver.submit(request(5, kind=1, length=20))
    finish(driver)


def test_stages_lost_in_the_middle_of_a_save_go_on_saving_what_their_stores_lack() -> None:
    driver = Driver(config())
    driver.submit(request(1))
    while not driver.moves:
        driver.answer()
    driver.lose()  # the save will not be answered
    driver.submit(request(2))
    finish(driver)

    def counted() -> tuple[float, float]:
        found = statistics(driver.core)
        return found["num_tier_blocks"], found["num_saved_blocks"]

    assert counted() == (8, 8)
    for _ in range(3):
        driver.stages.stores.forget(rank=0, which=0, tells=False)
    driver.lose()
    assert counted() == (5, 8)
    driver.submit(request(3))
    finish(driver)
    assert counted() == (8, 11)
    assert statistics(driver.core)["num_fetched_blocks"] == sum(
        len(fetch.blocks) for fetch in fetches(driver)
    )


def test_memory_that_moves_hold_comes_back() -> None:
    driver = kept(config(num_blocks=12), request(1, length=40))
    driver.submit(request(2, length=40))
    assert len(fetches(driver)) == 1
    driver.submit(request(3, kind=5, length=40))
    assert not driver.outstanding, "there is no memory for it"
    driver.answer_move()
    assert driver.outstanding
    finish(driver)


def test_the_next_order_takes_over_waiting_requests() -> None:
    driver = kept(config(), request(1))
    driver.submit(request(2))
    driver.send(Reconfigure({"order": "shortest"}))
    finish(driver)


def test_a_replay_gives_the_same() -> None:
    driver = Driver(config())
    driver.submit(request(1))
    finish(driver)
    driver.lose()
    driver.submit(request(2))
    driver.submit(request(3, kind=2))
    finish(driver)
    assert fetches(driver)
    rows = [config_row(config()), *[to_row(*call) for call in driver.log]]
    assert check_replay(rows) == len(driver.log) + 1


def test_events_that_cannot_be() -> None:
    driver = Driver(config())
    with pytest.raises(ValueError, match="move 7"):
        driver.core.handle(Moved(7, 0), 0.0)
    for settings in (config(tier_ranks=0), config(prefix_cache=False)):
        core = build_core(settings)
        with pytest.raises(ValueError, match="no second tier"):
            core.handle(TierHolds(()), 0.0)
        core.handle(PipelineLost(), 0.0)
        assert "num_tier_blocks" not in statistics(core)


# ---- a tier that other engines save into -----------------------------------------------------


def saved_elsewhere(driver: Driver, *requests: Request) -> None:
    """Another engine has saved their blocks, of which this one does not know."""
    before = Driver(config())
    for one in requests:
        before.submit(one)
    before.drain()
    driver.stages.stores.ranks = before.stages.stores.ranks


def begun(number: int, **changes: Any) -> tuple[Request, Request]:
    """A request, and how it comes here with its first token."""
    plain = request(number, **changes)
    driver = Driver(config())
    driver.submit(plain)
    driver.drain()
    return plain, replace(plain, output=tuple(driver.callers[number].tokens[:1]))


def test_a_stream_begun_elsewhere_is_fetched_though_its_blocks_are_unknown() -> None:
    plain, resumed = begun(1)
    driver = Driver(config(tier_shared=True))
    saved_elsewhere(driver, plain)
    driver.submit(resumed)
    (fetch,) = fetches(driver)
    assert len(fetch.blocks) == 7
    finish(driver)
    rows = [config_row(config(tier_shared=True)), *[to_row(*call) for call in driver.log]]
    assert check_replay(rows) == len(driver.log) + 1
    assert driver.plans[0].named_slices[0].start == 28, "only what follows is computed"
    assert not saves(driver)[1:], "what a peer has saved is not saved again"
    unaware = Driver(config())
    saved_elsewhere(unaware, plain)
    unaware.submit(resumed)
    assert not fetches(unaware)


def test_what_is_not_there_is_computed_after_one_try() -> None:
    _, resumed = begun(1)
    driver = Driver(config(tier_shared=True))
    driver.submit(resumed)
    driver.answer_move()
    assert driver.plans[0].named_slices[0].start == 0
    finish(driver)
    assert len(fetches(driver)) == 1


def test_a_new_prompt_is_not_looked_for() -> None:
    driver = Driver(config(tier_shared=True))
    saved_elsewhere(driver, request(1))
    driver.submit(request(1))
    assert not fetches(driver)
    finish(driver)


def test_an_engine_that_hands_over_saves_every_chunk_at_once() -> None:
    """And says when all that was completed is saved."""
    driver = Driver(config(hands_over=True, token_budget=8))
    driver.submit(request(1, length=31))
    tier = driver.core.tier
    assert tier is not None
    assert (tier.queue.num_queued, tier.queue.num_settled) == (0, 0)
    driver.answer()
    assert [len(save.blocks) for save in saves(driver)] == [2]
    driver.answer()
    assert (tier.queue.num_queued, tier.queue.num_settled) == (4, 0)
    driver.answer_move()
    assert (tier.queue.num_queued, tier.queue.num_settled) == (4, 2)
    assert [len(save.blocks) for save in saves(driver)] == [2, 2]
    finish(driver)
    assert tier.queue.num_queued == tier.queue.num_settled == 32 // 4


def test_what_a_peer_waits_for_is_saved_at_once() -> None:
    """Also while steps run, where a few blocks wait for more."""
    driver = Driver(config(pipeline_depth=1))
    driver.submit(request(1, length=12, sampling=SamplingParams(max_tokens=30)))
    for _ in range(3):
        driver.answer()
    assert not saves(driver)
    driver.send(SaveNow())
    assert [len(save.blocks) for save in saves(driver)] == [3]
    while driver.outstanding and len(driver.callers[1].tokens) < 9:
        driver.answer_move() if driver.moves else driver.answer()
    assert [len(save.blocks) for save in saves(driver)] == [3], "what came later waits again"
    driver.send(SaveNow())
    assert [len(save.blocks) for save in saves(driver)] == [3, 2]
    finish(driver)
    rows = [config_row(driver.config), *[to_row(*call) for call in driver.log]]
    assert check_replay(rows) == len(rows)
    build_core(config(tier_ranks=0)).handle(SaveNow(), 0.0)
