"""Answers of two ranks of a last stage, read from a compiled graph after its wake-up."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import time
from typing import Any

import pytest
import ray

from actors.executor import placement
from actors.scheduling.plan import StepPlan, StepResult
from actors.stage.actor import StageActor
from actors.transport import graph_pipeline
from actors.transport.graph_pipeline import GraphPipeline, set_channel_bytes
from actors.transport.messages import StageMessage, pack

_LIMIT_S = 1.5
_CHANNEL_BYTES = 4096


class Stage(StageActor):
    """Computes nothing. `late(judge, frozen_s, late_s)` sets what its next answer meets, once the
    judge has been woken for it."""

    def __init__(self, is_last: bool) -> None:
        set_channel_bytes(_CHANNEL_BYTES)
        self._is_last, self._is_alone = is_last, False
        self._mailbox = self._next = None
        self._late: tuple[int, float, float] | None = None

    def late(self, judge: int, frozen_s: float, late_s: float) -> None:
        self._late = (judge, frozen_s, late_s)

    def watch(self) -> None:
        time.sleep(3600)

    def _compute(self, message: StageMessage) -> Any:
        ticket, packed, _, _, error = message
        if not self._is_last:
            return ticket, packed, None, (), error
        return ticket, pack(StepResult(ticket, ((7, ticket),))), error

    def _step(self, message: StageMessage) -> Any:
        answer = super()._step(message)
        if (late := self._late) is not None:
            self._late = None
            judge, frozen_s, late_s = late
            if frozen_s:
                time.sleep(_LIMIT_S / 8)  # until the judge reads
                # By another process, which also ends it should this one die.
                freeze = f"kill -STOP {judge}; sleep {frozen_s}; kill -CONT {judge}"
                subprocess.run(["/bin/sh", "-c", freeze], check=True)
            time.sleep(late_s)
        return answer


@pytest.mark.ray
async def test_answers_that_come_late(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are waited for as long as the scheduler runs: of what stands still together with it
    nothing is lost, nor of what the other rank had answered."""
    monkeypatch.setattr(graph_pipeline, "_READ_TIMEOUT_S", _LIMIT_S)
    actor = ray.remote(concurrency_groups=placement._CONCURRENCY_GROUPS)(Stage)
    stages = [[actor.options(num_cpus=0).remote(last) for _ in range(2)] for last in (False, True)]
    set_channel_bytes(_CHANNEL_BYTES)
    pipeline = GraphPipeline(stages, depth=2)
    await pipeline.open()
    answers: asyncio.Queue[Any] = asyncio.Queue()
    pipeline.listen(answers.put_nowait, answers.put_nowait)
    steps = itertools.count()

    async def answer(rank: int, frozen_s: float, late_s: float) -> None:
        step_id = next(steps)
        late = stages[1][rank].late.options(concurrency_group="watch")
        await late.remote(os.getpid(), frozen_s, late_s)
        pipeline.submit(StepPlan(step_id, ()))
        async with asyncio.timeout(30):
            answer = await answers.get()
        assert answer == StepResult(step_id, ((7, step_id),))

    try:
        for rank in (0, 1):
            await answer(rank, frozen_s=1.5 * _LIMIT_S, late_s=_LIMIT_S / 8)
            await answer(rank, frozen_s=0.0, late_s=0.0)
        with pytest.raises(AssertionError, match="no answer in the graph: TimeoutError: none wit"):
            await answer(rank=1, frozen_s=0.0, late_s=10 * _LIMIT_S)
    finally:
        pipeline.close()
