"""Answers of a single stage's ranks, which come by a socket each."""

from __future__ import annotations

import asyncio

import pytest

from actors.scheduling.plan import StepPlan, StepResult
from actors.transport import graph_pipeline
from actors.transport.graph_pipeline import GraphPipeline
from actors.transport.messages import StepError, pack


class Scheduler:
    """What a pipeline of one stage of so many ranks tells it."""

    def __init__(self, ranks: int) -> None:
        self.answers: list[StepResult | StepError] = []
        self.lost: list[str] = []
        self.is_lost = asyncio.Event()
        self.pipeline = GraphPipeline([[object()] * ranks], depth=2)
        self.pipeline.listen(self.answers.append, self._lose)

    def _lose(self, reason: str) -> None:
        self.lost.append(reason)
        self.is_lost.set()

    def tell(self, ticket: int, rank: int, step_id: int, failure: str | None = None) -> None:
        """A rank's answer to a step arrives."""
        is_first = rank == 0 and failure is None
        packed = pack(StepResult(step_id, ((7, step_id),))) if is_first else b""
        self.pipeline._woken(pack((ticket, packed, failure)))


def test_a_step_is_answered_once_all_ranks_have() -> None:
    scheduler = Scheduler(3)
    for step_id in (10, 11):
        scheduler.pipeline.submit(StepPlan(step_id, ()))
    scheduler.tell(0, 2, 10)
    scheduler.tell(1, 2, 11)  # which is a step ahead of the others
    scheduler.tell(0, 0, 10)
    assert not scheduler.answers
    scheduler.tell(0, 1, 10)
    assert scheduler.answers == [StepResult(10, ((7, 10),))]
    scheduler.tell(1, 1, 11)
    scheduler.tell(1, 0, 11)
    assert scheduler.answers[1:] == [StepResult(11, ((7, 11),))]
    assert not scheduler.lost


@pytest.mark.parametrize("rank", [0, 1])
async def test_the_failure_of_any_rank_is_the_steps(rank: int) -> None:
    scheduler = Scheduler(2)
    scheduler.pipeline.submit(StepPlan(5, ()))
    scheduler.tell(0, rank, 5, "out of memory")
    assert not scheduler.answers
    scheduler.tell(0, 1 - rank, 5)
    assert scheduler.answers == [StepError(5, "out of memory")]


async def test_a_rank_that_fails_alone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others never answer: they wait for it within a sum. What it said is told."""
    monkeypatch.setattr(graph_pipeline, "_OTHERS_WITHIN_S", 0.0)
    scheduler = Scheduler(3)
    for step_id in (5, 6):
        scheduler.pipeline.submit(StepPlan(step_id, ()))
    scheduler.tell(0, 1, 5, "out of memory")
    scheduler.tell(0, 2, 5)
    await scheduler.is_lost.wait()
    assert scheduler.lost == ["a rank failed, for which the others wait: out of memory"]
    assert not scheduler.answers


def test_an_answer_to_another_step_ends_the_stages() -> None:
    scheduler = Scheduler(1)
    scheduler.pipeline.submit(StepPlan(5, ()))
    scheduler.tell(3, 0, 5)
    assert scheduler.lost == ["ticket 0 was answered with 3"]
