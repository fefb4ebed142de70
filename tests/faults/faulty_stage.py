"""Stages that do what a request's prompt tells them: raise, break for good, or kill themselves."""

from __future__ import annotations

import os
import signal
from typing import Any

import actors.executor.placement
from actors.engine.config import EngineConfig
from actors.engine.scheduler import SchedulerActor
from actors.executor.placement import kill_stages
from actors.scheduling.plan import StepPlan
from actors.stage.actor import StageActor
from actors.stage.runner import StageRunner
from actors.stage.spec import StageInfo
from actors.transport.graph_pipeline import GraphPipeline

KILL, BREAK, RAISE = ((250, 251, number) for number in (1, 2, 3))  # how their prompts begin


class _FaultyRunner:
    def __init__(self, runner: StageRunner) -> None:
        self._runner = runner
        self._orders: dict[int, tuple[int, ...]] = {}  # by request
        self._is_broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(self, plan: StepPlan, *rest: Any) -> Any:
        self._orders |= {start.request_id: start.tokens[:3] for start in plan.started}
        orders = {self._orders.get(part.request_id) for part in plan.named_slices}
        if KILL in orders:
            os.kill(os.getpid(), signal.SIGKILL)
        # Broken by its decode, and not by its replay in the stage that comes after.
        self._is_broken |= BREAK in orders and not plan.started
        if self._is_broken or RAISE in orders:
            raise RuntimeError("the device is gone")
        return self._runner.execute(plan, *rest)


class FaultyStage(StageActor):
    def load(self, group_address: str | None = None) -> StageInfo:
        info = super().load(group_address)
        assert self._runner is not None
        self._runner = _FaultyRunner(self._runner)  # type: ignore[assignment]
        return info


class FaultyScheduler(SchedulerActor):
    """Its stages are faulty, and the first time it builds them anew there is no room on a disk."""

    def __init__(self, config: EngineConfig, stages: list[list[Any]]) -> None:
        kill_stages(stages)  # which the replica made, and are sound
        actors.executor.placement.StageActor = FaultyStage  # type: ignore[attr-defined,misc]
        connect, self.num_opened = GraphPipeline.open, 0

        async def open_or_not(pipeline: GraphPipeline, *callbacks: Any) -> None:
            self.num_opened += 1
            if self.num_opened == 2:
                raise OSError(28, "No space left on device")
            await connect(pipeline, *callbacks)

        GraphPipeline.open = open_or_not  # type: ignore[method-assign]
        super().__init__(config, [])
