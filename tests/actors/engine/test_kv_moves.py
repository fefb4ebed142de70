"""Moves of KV between device and stores: each is answered, or the stages are reported lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.engine.config import EngineConfig
from actors.engine.kv_moves import KVMoves
from actors.engine.peers import OWNER
from actors.executor.stage_set import StagesFailed
from actors.scheduling.events import (
    ClearTier,
    Event,
    Fetch,
    FetchEarly,
    KVMove,
    Moved,
    Save,
    TierChange,
    TierHolds,
)
from actors.stage.spec import StageSpec
from actors.transport.background_tasks import BackgroundTasks
from actors.transport.messages import AbortRequests, Answer, Ask, IterationOutputs, Question
from actors.transport.running_time import LOOKS
from tests.actors.engine import paper_engine
from tests.actors.engine.paper_engine import background
from tests.actors.scheduling import short_lives
from tests.actors.scheduling.short_lives import config
from tests.standstill import pass_time

BLOCKS = ((3, b"x"), (4, b"y"))
HELD, LOST = TierChange((b"x", b"y")), TierChange((b"x",), (b"y",))


class Stages:
    """A StageSet of two ranks. The test says when and what they answer."""

    def __init__(self) -> None:
        self.tier: tuple[tuple[bytes, ...], ...] = ((b"x",), ())
        self.asked: list[KVMove] = []
        self.answer: list[tuple[int, TierChange]] | StagesFailed = [(2, HELD), (1, LOST)]
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    async def move(self, move: KVMove) -> list[tuple[int, TierChange]]:
        self.asked.append(move)
        await self.may_go_on.wait()
        if isinstance(self.answer, StagesFailed):
            raise self.answer
        return self.answer


class Engine:
    def __init__(self, deadline_s: float = 20.0) -> None:
        self.stages: Any = Stages()
        self.events: list[Event] = []
        self.losses: list[str] = []
        self.hung: list[bool] = []  # of the losses
        settings = EngineConfig(StageSpec("none"), config(), step_deadline_s=deadline_s)
        self.moves = KVMoves(
            self.stages, BackgroundTasks(), settings, self.events.append, self._lost
        )

    def _lost(self, reason: str, is_hung: bool) -> None:
        self.losses.append(reason)
        self.hung.append(is_hung)


async def test_a_block_counts_as_moved_where_every_rank_moved_it() -> None:
    engine = Engine()
    engine.moves.begin(Save(1, BLOCKS))
    engine.moves.begin(Fetch(2, BLOCKS, 3.5))
    await background()
    assert engine.stages.asked == [Save(1, BLOCKS), Fetch(2, BLOCKS, 3.5)]
    assert engine.events == [Moved(1, 1, (HELD, LOST)), Moved(2, 1, (HELD, LOST))]
    assert engine.losses == []


async def test_a_move_that_fails_costs_the_stages() -> None:
    engine = Engine()
    engine.stages.answer = StagesFailed("a move of KV failed: ActorDiedError")
    engine.moves.begin(Save(1, BLOCKS))
    await background()
    assert (engine.events, engine.losses) == ([], ["a move of KV failed: ActorDiedError"])
    assert engine.hung == [False]


async def test_a_move_without_an_answer_costs_the_stages_once_its_own_limit_has_passed() -> None:
    engine = Engine(deadline_s=0.02)
    engine.stages.may_go_on.clear()
    begin_s = asyncio.get_running_loop().time()
    engine.moves.begin(Fetch(2, BLOCKS, 0.1))
    engine.moves.begin(Save(1, BLOCKS))
    await background()
    assert asyncio.get_running_loop().time() - begin_s >= 0.12
    assert engine.events == []
    assert engine.losses == [f"no answer to a move of KV within {s} s" for s in ("0.1", "0.0")]
    assert engine.hung == [True, True]


async def test_a_move_has_its_time_behind_others_that_take_theirs() -> None:
    """Those of a rank stand in one thread, and each may use its own limit: a store that answers
    nothing costs no stages, however many fetches wait for it."""
    engine = Engine(deadline_s=0.1)
    thread = asyncio.Lock()

    async def move(move: KVMove) -> list[tuple[int, TierChange]]:
        engine.stages.asked.append(move)
        async with thread:
            await asyncio.sleep(move.limit_s if isinstance(move, Fetch) else 0.0)  # what is tested
        return [(0, TierChange())]

    engine.stages.move = move
    for number in range(15):
        engine.moves.begin(Fetch(number, BLOCKS, 0.02))
    engine.moves.begin(Save(15, BLOCKS))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(engine.stages.asked) == 16, "a move is asked for before the one before it ends"
    await background()
    assert engine.losses == []
    assert engine.events == [Moved(number, 0, (TierChange(),)) for number in range(16)]


async def test_a_move_has_its_time_although_the_engine_stood_still() -> None:
    engine = Engine(deadline_s=1.0)
    engine.stages.may_go_on.clear()
    engine.moves.begin(Save(1, BLOCKS))
    await asyncio.sleep(0)
    pass_time(2.0)  # the whole event loop stands still
    await asyncio.sleep(0)  # what is due is done before the answer comes
    engine.stages.may_go_on.set()
    await background()
    assert (engine.events, engine.losses) == ([Moved(1, 1, (HELD, LOST))], [])


@pytest.mark.parametrize(
    ("is_hung", "step_s", "num_suspects"), [(True, 1.0, 0), (True, 15.0, 1), (False, 1.0, 1)]
)
async def test_steps_that_go_on_beside_a_move_that_hangs_are_not_suspects(
    is_hung: bool, step_s: float, num_suspects: int
) -> None:
    """Others may be: a stage that died or stood still in a step answered no move either."""
    engine = paper_engine.Engine()
    engine.submit(one := short_lives.request(1, prompt=4, output=6))
    engine.stages.answer()
    for _ in range(LOOKS):  # of the deadline's timer
        engine.now_s += step_s / LOOKS
        engine.loop._deadline._look()
    engine.loop._moves._lost("no answer to a move of KV within 20.0 s", is_hung)
    await background()
    assert sum(map(len, engine.core.trials)) == num_suspects
    engine.stages.answer_all()
    engine.check_complete(one)


async def test_answers_of_lost_stages_are_dropped() -> None:
    engine = Engine()
    engine.stages.may_go_on.clear()
    engine.moves.begin(Save(1, BLOCKS))
    await asyncio.sleep(0)
    engine.moves.forget()
    lost, engine.stages.may_go_on = engine.stages.may_go_on, asyncio.Event()
    engine.stages.may_go_on.set()
    engine.moves.begin(Save(2, BLOCKS))
    for _ in range(5):
        await asyncio.sleep(0)
    assert engine.events == [Moved(2, 1, (HELD, LOST))], "it waits for the lost one"
    lost.set()
    await background()
    assert engine.events == [Moved(2, 1, (HELD, LOST))]
    failing = Engine()
    failing.stages.answer = StagesFailed("gone")
    failing.moves.begin(Save(1, BLOCKS))
    failing.moves.forget()
    await background()
    assert (failing.events, failing.losses) == ([], [])


class Running:
    """A real loop that decodes one request. Its blocks of 4 tokens are saved once a peer waits for
    them and the test says so: all of them, or move by move."""

    def __init__(self, **changes: Any) -> None:
        self.engine = paper_engine.Engine(
            tier_ranks=1, tier_shared=True, prefix_cache=True, **changes
        )
        self.engine.stages.move = self._move
        self.may_save = asyncio.Event()
        self.under_way: list[tuple[list[bytes], asyncio.Event]] = []
        self.engine.submit(short_lives.request(1, prompt=4, output=40))
        self.engine.stages.answer()

    async def _move(self, move: KVMove) -> Any:
        blocks = () if isinstance(move, ClearTier) else move.blocks
        digests, done = [digest for _, digest in blocks], asyncio.Event()
        self.under_way.append((digests, done))
        if not self.may_save.is_set():
            await done.wait()
        return [(len(blocks), TierChange(tuple(digests)))]

    def let_save(self) -> None:
        self.may_save.set()
        for _, done in self.under_way:
            done.set()

    async def answer_move(self) -> list[bytes]:
        """The blocks of the oldest move, which ends."""
        digests, done = self.under_way.pop(0)
        done.set()
        await self.settle()
        return digests

    async def ask(self, question: Question, *arguments: Any) -> None:
        self.engine.wires.receive(OWNER, Ask(1, question, arguments))
        await self.settle()

    async def settle(self) -> None:
        for _ in range(20):  # a few for each move of a queue
            await asyncio.sleep(0)

    @property
    def answered(self) -> bool:
        return Answer(1, None) in self.engine.told(Answer)

    @property
    def num_tokens(self) -> int:
        return len(self.engine.stream(1)[0])


async def test_a_peer_is_told_once_a_requests_next_block_is_saved() -> None:
    running = Running()
    await running.ask("kv_saved", 1)
    while running.num_tokens < 5:
        assert not running.answered
        running.engine.stages.answer()
        await running.settle()
    assert not running.answered, "it is complete, and not saved"
    running.let_save()
    await running.settle()
    assert running.answered
    assert running.num_tokens == 5
    running.engine.stages.answer_all()


async def test_a_peer_is_told_once_what_was_complete_is_saved() -> None:
    running = Running(most_saved=1)
    running.engine.submit(short_lives.request(2, prompt=24, output=30))
    for _ in range(3):
        running.engine.stages.answer()
        await running.settle()
    await running.ask("kv_saved")
    queue = running.engine.core.tier.queue  # type: ignore[union-attr]
    num_queued = queue.num_queued
    while queue.num_queued == num_queued:  # more is completed meanwhile
        running.engine.stages.answer()
        await running.settle()
    num_saved = 0
    while not running.answered:
        num_saved += len(await running.answer_move())
    assert num_saved == num_queued
    running.let_save()
    running.engine.stages.answer_all()


async def test_a_reset_is_answered_once_the_stores_are_empty_and_the_stream_goes_on() -> None:
    running = Running()
    await running.ask("reset_prefix_cache")
    assert len(running.under_way) == 1
    assert not running.answered
    await running.answer_move()
    assert running.answered
    await running.ask("kv_saved", 1)  # it has nothing that a peer finds
    assert running.engine.told(Answer).count(Answer(1, None)) == 2
    running.engine.stages.answer_all()
    assert len(running.engine.stream(1)[0]) == 40


async def test_a_move_that_deletes_may_take_longer_than_a_step() -> None:
    engine = Engine(deadline_s=0.0)
    engine.stages.answer = [(0, HELD), (0, LOST)]
    engine.moves.begin(ClearTier(1))
    await background()
    assert (engine.losses, engine.events) == ([], [Moved(1, 0, (HELD, LOST))])


async def test_the_last_block_of_a_stream_is_saved_before_the_blocks_of_others() -> None:
    """It waits for the save under way, and not for those that are queued."""
    running = Running(most_saved=4, max_step_tokens=64)
    running.engine.submit(short_lives.request(2, prompt=48, output=2))
    await running.ask("kv_saved", 1)
    while running.num_tokens < 5:
        running.engine.stages.answer()
        await running.settle()
    queue = running.engine.core.tier.queue  # type: ignore[union-attr]
    running.engine.wires.receive(OWNER, Ask(2, "kv_saved", ()))
    await running.settle()
    assert queue.num_unsaved + queue.num_saving > 8, "the prompt of another"
    num_before = 0
    while not running.answered:
        num_before += len(await running.answer_move())
    assert num_before <= 4 + 2
    assert Answer(2, None) not in running.engine.told(Answer)
    running.let_save()
    await running.settle()
    assert Answer(2, None) in running.engine.told(Answer)
    running.engine.stages.answer_all()


async def test_a_peer_is_told_once_the_blocks_that_it_names_are_here() -> None:
    """How many of them are, whatever else is fetched."""
    running = Running()
    mine, others = (b"x", b"y"), tuple([bytes([number]) for number in range(30)])
    for early in (FetchEarly(mine[:1]), FetchEarly(others), FetchEarly(mine, is_last=True)):
        running.engine.wires.receive(OWNER, early)
    await running.ask("kv_fetched", mine)
    await running.answer_move()
    assert not running.engine.told(Answer), "the second is still to come"
    while not running.engine.told(Answer):
        fetched = await running.answer_move()
    assert b"y" in fetched
    assert running.engine.told(Answer) == [Answer(1, 2)]
    tier = running.engine.core.tier
    assert tier is not None
    assert any(map(tier.is_coming, others))
    await running.ask("kv_fetched", (b"z", *mine))
    assert running.engine.told(Answer)[-1] == Answer(1, 0), "the first was never told of"
    running.let_save()
    running.engine.stages.answer_all()


async def test_without_a_tier_nobody_waits() -> None:
    moves = Engine().moves
    await moves.saved()
    await moves.saved(1)
    assert await moves.fetched((b"x",)) == 0


async def test_a_peer_is_told_of_the_next_token_behind_it() -> None:
    running = Running()
    await running.ask("next_token", 1)
    assert not running.answered
    running.engine.stages.answer()
    await running.settle()
    kinds = [type(message) for _, message in running.engine.wires.sent]
    assert kinds[-1] is Answer
    assert kinds[-2] is IterationOutputs
    running.let_save()
    running.engine.stages.answer_all()


@pytest.mark.parametrize("question", ["kv_saved", "next_token"])
@pytest.mark.parametrize("end", ["aborted", "preempted", "unknown"])
async def test_nobody_waits_for_a_request_that_does_not_run(question: Question, end: str) -> None:
    running = Running()
    running.let_save()
    await running.ask(question, 99 if end == "unknown" else 1)
    core = running.engine.core
    if end == "aborted":
        running.engine.wires.receive(OWNER, AbortRequests((1,)))
    elif end == "preempted":
        assert not running.answered
        core.requests.preempt(core.requests.by_id[1])
        running.engine.stages.answer()
    await running.settle()
    assert running.answered
    running.engine.stages.answer_all()


async def test_the_core_is_told_what_the_stores_hold_at_the_start() -> None:
    engine = Engine()
    engine.moves.start()
    assert engine.events == [TierHolds(((b"x",), ()))]
    without = Engine()
    without.stages.tier = ()
    without.moves.start()
    assert without.events == []
