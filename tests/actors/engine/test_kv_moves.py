"""Moves of KV between device and stores: each is answered, or the stages are reported lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from actors.engine.config import EngineConfig
from actors.engine.kv_moves import KVMoves
from actors.engine.peers import OWNER
from actors.engine.recovery import BackgroundTasks
from actors.executor.stage_set import StagesFailed
from actors.scheduling.events import Event, Fetch, Moved, Save, TierChange, TierHolds
from actors.stage.spec import StageSpec
from actors.transport.messages import AbortRequests, Answer, Ask, IterationOutputs, Question
from tests.actors.engine import paper_engine
from tests.actors.engine.paper_engine import background
from tests.actors.scheduling import short_lives
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


@pytest.mark.parametrize("answers", ["saved", "fetched"])
async def test_a_peer_is_told_once_what_was_complete_has_moved(answers: str) -> None:
    class Queue:
        num_queued, num_settled = 4, 2

    class Other:
        num_queued, num_settled = 9, 0

    class Manager:
        @staticmethod
        def match(digests: Sequence[bytes]) -> list[int]:
            return [5, 6][: len(digests)]

    class Tier:
        queue = Queue() if answers == "saved" else Other()
        early = Other() if answers == "saved" else Queue()
        block_manager = Manager()

    class OneCore:
        tier = Tier()

    moves = KVMoves(
        Stages(), BackgroundTasks(), EngineConfig(StageSpec("none"), config()),
        lambda event: None, lambda why: None, OneCore(),  # type: ignore[arg-type]
    )  # fmt: skip
    ask = getattr(moves, answers)
    told = asyncio.create_task(ask())
    await asyncio.sleep(0)
    Queue.num_queued, Queue.num_settled = 9, 3  # more has been completed since
    moves.tell()
    await asyncio.sleep(0)
    assert not told.done()
    gone = asyncio.create_task(ask())
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    Queue.num_settled = 4
    moves.tell()
    assert await told == (None if answers == "saved" else 0)
    assert moves.waiting == []
    Queue.num_settled = 9
    await ask()
    if answers == "fetched":
        assert await moves.fetched((b"x", b"y", b"z")) == 2, "the third was given up"
    await getattr(Engine().moves, answers)()  # without a tier


class Running:
    """A real loop that decodes one request. Its blocks of 4 tokens are saved once a peer waits for
    them and the test says so."""

    def __init__(self) -> None:
        self.engine = paper_engine.Engine(tier_ranks=1, tier_shared=True, prefix_cache=True)
        self.engine.stages.move = self._move
        self.may_save = asyncio.Event()
        self.engine.submit(short_lives.request(1, prompt=4, output=40))
        self.engine.stages.answer()

    async def _move(self, blocks: Any, limit_s: float | None) -> Any:
        await self.may_save.wait()
        return [(len(blocks), TierChange(tuple(digest for _, digest in blocks)))]

    async def ask(self, question: Question, *arguments: int) -> None:
        self.engine.wires.receive(OWNER, Ask(1, question, arguments))
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
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
    running.may_save.set()
    await running.settle()
    assert running.answered
    assert running.num_tokens == 5
    running.engine.stages.answer_all()


async def test_a_peer_is_told_of_the_next_token_behind_it() -> None:
    running = Running()
    await running.ask("next_token", 1)
    assert not running.answered
    running.engine.stages.answer()
    await running.settle()
    kinds = [type(message) for _, message in running.engine.wires.sent]
    assert kinds[-1] is Answer
    assert kinds[-2] is IterationOutputs
    running.may_save.set()
    running.engine.stages.answer_all()


@pytest.mark.parametrize("question", ["kv_saved", "next_token"])
@pytest.mark.parametrize("end", ["aborted", "preempted", "unknown"])
async def test_nobody_waits_for_a_request_that_does_not_run(question: Question, end: str) -> None:
    running = Running()
    running.may_save.set()
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
