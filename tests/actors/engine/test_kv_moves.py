"""Moves of KV between device and stores: each is answered, or the stages are reported lost."""

from __future__ import annotations

import asyncio
from typing import Any

from actors.engine.config import EngineConfig
from actors.engine.kv_moves import KVMoves
from actors.engine.recovery import BackgroundTasks
from actors.executor.stage_set import StagesFailed
from actors.scheduling.events import Event, Fetch, Moved, Save, TierChange, TierHolds
from actors.stage.spec import StageSpec
from tests.actors.engine.paper_engine import background
from tests.actors.scheduling.short_lives import config

BLOCKS = ((3, b"x"), (4, b"y"))
HELD, LOST = TierChange((b"x", b"y")), TierChange((b"x",), (b"y",))


class Stages:
    """A StageSet of two ranks. The test says when and what they answer."""

    def __init__(self) -> None:
        self.tier: tuple[tuple[bytes, ...], ...] = ((b"x",), ())
        self.asked: list[tuple[Any, float | None]] = []
        self.answer: list[tuple[int, TierChange]] | StagesFailed = [(2, HELD), (1, LOST)]
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    async def move(self, blocks: Any, limit_s: float | None) -> list[tuple[int, TierChange]]:
        self.asked.append((blocks, limit_s))
        await self.may_go_on.wait()
        if isinstance(self.answer, StagesFailed):
            raise self.answer
        return self.answer


class Engine:
    def __init__(self, deadline_s: float = 20.0) -> None:
        self.stages: Any = Stages()
        self.events: list[Event] = []
        self.losses: list[str] = []
        settings = EngineConfig(StageSpec("none"), config(), step_deadline_s=deadline_s)
        self.moves = KVMoves(
            self.stages, BackgroundTasks(), settings, self.events.append, self.losses.append
        )


async def test_a_block_counts_as_moved_where_every_rank_moved_it() -> None:
    engine = Engine()
    engine.moves.begin(Save(1, BLOCKS))
    engine.moves.begin(Fetch(2, BLOCKS, 3.5))
    await background()
    assert engine.stages.asked == [(BLOCKS, None), (BLOCKS, 3.5)]
    assert engine.events == [Moved(1, 1, (HELD, LOST)), Moved(2, 1, (HELD, LOST))]
    assert engine.losses == []


async def test_a_move_that_fails_costs_the_stages() -> None:
    engine = Engine()
    engine.stages.answer = StagesFailed("a move of KV failed: ActorDiedError")
    engine.moves.begin(Save(1, BLOCKS))
    await background()
    assert (engine.events, engine.losses) == ([], ["a move of KV failed: ActorDiedError"])


async def test_a_move_without_an_answer_costs_the_stages_once_its_own_limit_has_passed() -> None:
    engine = Engine(deadline_s=0.02)
    engine.stages.may_go_on.clear()
    begin_s = asyncio.get_running_loop().time()
    engine.moves.begin(Fetch(2, BLOCKS, 0.1))
    engine.moves.begin(Save(1, BLOCKS))
    await background()
    assert asyncio.get_running_loop().time() - begin_s >= 0.12
    assert engine.events == []
    assert engine.losses == [f"no answer to a move of KV within {s} s" for s in ("0.0", "0.1")]


async def test_answers_of_lost_stages_are_dropped() -> None:
    engine = Engine()
    engine.stages.may_go_on.clear()
    engine.moves.begin(Save(1, BLOCKS))
    await asyncio.sleep(0)
    engine.moves.forget()
    engine.moves.begin(Save(2, BLOCKS))
    engine.stages.may_go_on.set()
    await background()
    assert engine.events == [Moved(2, 1, (HELD, LOST))]
    failing = Engine()
    failing.stages.answer = StagesFailed("gone")
    failing.moves.begin(Save(1, BLOCKS))
    failing.moves.forget()
    await background()
    assert (failing.events, failing.losses) == ([], [])


async def test_a_peer_is_told_once_what_was_complete_is_saved() -> None:
    class Queue:
        num_queued, num_settled = 4, 2

    class Tier:
        queue = Queue()

    class OneCore:
        tier = Tier()

    moves = KVMoves(
        Stages(), BackgroundTasks(), EngineConfig(StageSpec("none"), config()),
        lambda event: None, lambda why: None, OneCore(),  # type: ignore[arg-type]
    )  # fmt: skip
    told = asyncio.create_task(moves.saved())
    await asyncio.sleep(0)
    Queue.num_queued, Queue.num_settled = 9, 3  # more has been completed since
    moves.tell()
    await asyncio.sleep(0)
    assert not told.done()
    gone = asyncio.create_task(moves.saved())
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    Queue.num_settled = 4
    moves.tell()
    await told
    assert moves.waiting == []
    Queue.num_settled = 9
    await moves.saved()
    await Engine().moves.saved()  # without a tier


async def test_the_core_is_told_what_the_stores_hold_at_the_start() -> None:
    engine = Engine()
    engine.moves.start()
    assert engine.events == [TierHolds(((b"x",), ()))]
    without = Engine()
    without.stages.tier = ()
    without.moves.start()
    assert without.events == []
