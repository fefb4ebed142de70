"""A chain of stages behind one small interface: plans go in, answers come out in order.

`GraphPipeline` (graph_pipeline.py) is the default; `CallPipeline` (`parallel.transport: call`) does
the same by plain actor calls, about ten times slower, which limits the effect of changes in Ray's
compiled graphs to one file. The same tests run on both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import ray

from actors.scheduling.plan import StepPlan, StepResult
from actors.transport.messages import StepError, pack, read_answer

StageHandles = Sequence[Sequence[Any]]  # [stage][rank] -> actor handle of StageActor


OnAnswer = Callable[[StepResult | StepError], None]
OnLost = Callable[[str], None]


class Pipeline(Protocol):
    """Callbacks run on the owner's event loop: on_answer once per submitted plan, in order;
    on_lost at most once, after which nothing more is answered."""

    async def open(self) -> None: ...

    def listen(self, on_answer: OnAnswer, on_lost: OnLost) -> None:
        """Set the callbacks; on_lost is called at once if the stages are already lost."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Send a plan; at most `depth` may be unanswered."""
        ...

    def close(self) -> None:
        """Stop answering and kill the stages."""
        ...


class Watched:
    """The common part of both transports: watching and killing the stages."""

    def __init__(self, stages: StageHandles) -> None:
        self._stages = stages
        self._on_answer: OnAnswer | None = None
        self._on_lost: OnLost | None = None
        self._lost_because: str | None = None
        self._watchers: list[asyncio.Task[None]] = []

    def listen(self, on_answer: OnAnswer, on_lost: OnLost) -> None:
        self._on_answer, self._on_lost = on_answer, on_lost
        if self._lost_because is not None:
            self.lose(self._lost_because)

    def watch(self) -> None:
        for number, ranks in enumerate(self._stages):
            for rank, actor in enumerate(ranks):
                name = f"stage {number} rank {rank}"
                self._watchers.append(asyncio.create_task(self._watch_one(name, actor)))

    async def _watch_one(self, name: str, actor: Any) -> None:
        try:
            await actor.watch.remote()
        except ray.exceptions.RayError as error:
            self.lose(f"{name} died: {type(error).__name__}")

    def lose(self, reason: str) -> None:
        self._lost_because = reason
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None:
            on_lost(reason)

    def kill(self) -> None:
        self._on_answer = self._on_lost = None
        for task in self._watchers:
            task.cancel()
        for ranks in self._stages:
            for actor in ranks:
                ray.kill(actor)


class CallPipeline(Watched):
    """Stages chained by plain actor calls: slower, and independent of compiled graphs."""

    def __init__(self, stages: StageHandles, depth: int) -> None:
        super().__init__(stages)
        self._pending: asyncio.Queue[tuple[int, list[Any]]] = asyncio.Queue()
        self._next_ticket = 0
        self._reader: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self.watch()
        self._reader = asyncio.create_task(self._read())

    def submit(self, plan: StepPlan) -> None:
        message = (self._next_ticket, pack(plan), None, (), None)
        self._next_ticket += 1
        messages: list[Any] = [message] * len(self._stages[0])
        for ranks in self._stages:
            messages = [actor.step.remote(m) for actor, m in zip(ranks, messages, strict=True)]
        self._pending.put_nowait((plan.step_id, messages))

    async def _read(self) -> None:
        while True:
            step_id, references = await self._pending.get()
            try:
                answers = [await reference for reference in references]
            except ray.exceptions.RayError as error:
                self.lose(f"a stage call failed: {type(error).__name__}")
                return
            failure = next((a[2] for a in answers if a[2] is not None), None)
            if self._on_answer is not None:
                # By the loop, as a socket's callbacks: an error in it does not end the reading.
                answer = read_answer(step_id, answers[0][1], failure)
                asyncio.get_running_loop().call_soon(self._on_answer, answer)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        self.kill()
