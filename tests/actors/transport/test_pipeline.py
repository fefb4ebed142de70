"""Stages chained by actor calls: answers in the order of plans, errors, and a loss told once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import ray

from actors.scheduling.plan import Slice, StepPlan, StepResult
from actors.transport.messages import StageAnswer, StepError, pack, unpack
from actors.transport.pipeline import CallPipeline


class Call:
    """`actor.method`, whose `remote()` is an awaitable as of Ray."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work = work

    def remote(self, *arguments: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._work(*arguments))


class Rank:
    """The plan goes through; the last stage draws a 7 for every slice that samples."""

    def __init__(self, is_last: bool) -> None:
        self.is_last = is_last
        self.tickets: list[int] = []
        self.failure: str | None = None
        self.dead = asyncio.Event()
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.step = Call(self._step)
        self.watch = Call(self._watch)

    async def _step(self, message: Any) -> Any:
        if isinstance(message, asyncio.Future):  # as Ray does with a reference
            message = await message
        ticket, packed, _, times, failure = message
        self.tickets.append(ticket)
        await self.may_go_on.wait()
        if self.dead.is_set():
            raise ray.exceptions.ActorDiedError
        failure = failure or self.failure
        if not self.is_last:
            return ticket, packed, None, times, failure
        plan = unpack(StepPlan, packed)
        tokens = tuple((part.request_id, 7) for part in plan.named_slices if part.samples)
        answer: StageAnswer = (ticket, pack(StepResult(plan.step_id, tokens)), failure)
        return answer

    async def _watch(self) -> None:
        await self.dead.wait()
        raise ray.exceptions.ActorDiedError

    def die(self) -> None:
        self.dead.set()
        self.may_go_on.set()


class Owner:
    """A pipeline of two stages of two ranks, and what it tells."""

    def __init__(self) -> None:
        self.ranks = [[Rank(stage == 1) for _ in range(2)] for stage in range(2)]
        self.answers: list[StepResult | StepError] = []
        self.losses: list[str] = []
        self.pipeline = CallPipeline(self.ranks, depth=2)

    async def has(self, num_answers: int) -> None:
        async with asyncio.timeout(10):
            while True:
                if len(self.answers) >= num_answers:
                    return
                await asyncio.sleep(0)


@pytest.fixture
async def owner(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Owner]:
    monkeypatch.setattr(ray, "kill", lambda rank: rank.die())
    made = Owner()
    await made.pipeline.open()
    made.pipeline.listen(made.answers.append, made.losses.append)
    yield made
    made.pipeline.close()


def plan(step_id: int) -> StepPlan:
    return StepPlan(step_id, (Slice(1, step_id, 1, True), Slice(2, 0, 4, False)))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_answers_come_in_the_order_of_the_plans(owner: Owner) -> None:
    slow = owner.ranks[0][1]
    slow.may_go_on.clear()
    for step_id in (3, 4, 5):
        owner.pipeline.submit(plan(step_id))
    await settle()
    assert owner.answers == []
    slow.may_go_on.set()
    await owner.has(3)
    assert owner.answers == [StepResult(step_id, ((1, 7),)) for step_id in (3, 4, 5)]
    assert all(rank.tickets == [0, 1, 2] for stage in owner.ranks for rank in stage)


@pytest.mark.parametrize(("stage", "rank"), [(0, 0), (1, 0), (1, 1)])
async def test_the_error_of_any_rank_fails_the_step(owner: Owner, stage: int, rank: int) -> None:
    owner.ranks[stage][rank].failure = "IndexError: 7"
    owner.pipeline.submit(plan(0))
    await owner.has(1)
    owner.ranks[stage][rank].failure = None
    owner.pipeline.submit(plan(1))
    await owner.has(2)
    assert owner.answers == [StepError(0, "IndexError: 7"), StepResult(1, ((1, 7),))]
    assert owner.losses == []


async def test_an_error_of_the_owner_does_not_end_the_answers(owner: Owner) -> None:
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))

    def on_answer(answer: StepResult | StepError) -> None:
        owner.answers.append(answer)
        raise KeyError(7)

    owner.pipeline.listen(on_answer, owner.losses.append)
    owner.pipeline.submit(plan(0))
    owner.pipeline.submit(plan(1))
    await owner.has(2)
    assert len(errors) == 2


@pytest.mark.parametrize(("stage", "rank"), [(0, 1), (1, 0)])
async def test_a_death_is_told_once_with_its_place(owner: Owner, stage: int, rank: int) -> None:
    owner.ranks[stage][rank].die()
    await settle()
    owner.pipeline.submit(plan(0))
    await settle()
    assert owner.losses == [f"stage {stage} rank {rank} died: ActorDiedError"]


async def test_a_death_before_any_listener_is_told_to_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "kill", lambda rank: rank.die())
    owner = Owner()
    await owner.pipeline.open()
    owner.ranks[1][1].die()
    await settle()
    owner.pipeline.listen(owner.answers.append, owner.losses.append)
    assert owner.losses == ["stage 1 rank 1 died: ActorDiedError"]
    owner.pipeline.close()


async def test_a_closed_pipeline_kills_its_stages_and_tells_nothing(owner: Owner) -> None:
    owner.ranks[1][0].may_go_on.clear()
    owner.pipeline.submit(plan(0))
    await settle()
    owner.pipeline.close()
    await settle()
    assert all(rank.dead.is_set() for stage in owner.ranks for rank in stage)
    assert (owner.answers, owner.losses) == ([], [])
