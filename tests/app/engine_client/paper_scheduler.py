"""Scheduler processes that are none: the real loop, core and socket, over stages made of paper.

Only what Ray does is replaced: creating an actor, calling it and killing it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import ray

import app.engine_client.link as link
from actors.calibration.start import with_model
from actors.engine.config import EngineConfig
from actors.engine.loop import EngineLoop
from actors.scheduling.build import build_core
from actors.scheduling.cost.model import CostModel
from actors.scheduling.plan import StepPlan
from actors.stage.spec import StageInfo, StageSpec
from tests.actors.engine.paper_engine import Stages
from tests.actors.scheduling.short_lives import config

INFO = StageInfo(8, 11, 64, "float32", "paper", 64, 1 << 20, (0,), 100)


class Call:
    """`actor.method`, whose `remote()` is an awaitable as of Ray."""

    def __init__(self, work: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._work = work

    def remote(self, *arguments: Any) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self._work(*arguments))


class PaperStages(Stages):
    """They answer by themselves, and kill their scheduler where the test says so."""

    pids = ((1,),)
    standby = "none"

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler.config.scheduler)
        self.adapters = dict(scheduler.config.adapters)
        self._scheduler = scheduler
        self._cluster = scheduler.cluster

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        asyncio.get_running_loop().call_soon(self.go_on)

    def go_on(self) -> None:
        if self._scheduler.is_dead or not self.unanswered or self._cluster.holds(self):
            return
        if any(part.request_id == self._cluster.killer for part in self.unanswered[0].named_slices):
            self._scheduler.die()
        else:
            self.answer()


class Scheduler:
    """One actor."""

    def __init__(self, cluster: Cluster, settings: EngineConfig) -> None:
        self.cluster = cluster
        self.config = settings
        self.is_dead = False
        self.core: Any = None
        self.stages: Any = None
        self.loop: Any = None
        self._ended = asyncio.Event()
        self.start = Call(self._start)
        self.serve = Call(self._serve)

    async def _start(self, path: str, fronts: None) -> tuple[StageInfo, int, str | None]:
        if self.cluster.start_errors:
            raise self.cluster.start_errors.pop(0)
        settings = self.config.scheduler
        if self.cluster.measured is not None:
            settings = with_model(self.config, settings, self.cluster.measured)
        self.core = build_core(settings)
        self.stages = PaperStages(self)
        self.loop = EngineLoop(
            self.config, self.core, self.core.handle, self.stages, None, self._ended.set
        )
        await self.loop.peers.connect_owner(path)
        return INFO, settings.num_blocks, None

    async def _serve(self) -> None:
        await self._ended.wait()
        if self.is_dead:
            raise ray.exceptions.RayActorError

    def die(self) -> None:
        self.is_dead = True
        self._ended.set()
        if self.loop is not None:
            self.loop.peers._owner.socket.close()


class Cluster:
    """What replicas find of Ray. Steps up to `num_steps` of a scheduler are answered."""

    def __init__(self) -> None:
        self.schedulers: list[Scheduler] = []
        self.start_errors: list[Exception] = []
        self.num_steps = 1 << 30
        self.measured: CostModel | None = None  # by each scheduler as it starts
        self.killer: int | None = None  # a request; its first step kills the scheduler

    @property
    def last(self) -> Scheduler:
        return self.schedulers[-1]

    def holds(self, stages: PaperStages) -> bool:
        return stages.unanswered[0].step_id >= self.num_steps

    def let_go(self) -> None:
        self.num_steps = 1 << 30
        self.last.stages.go_on()

    def options(self, **options: Any) -> Cluster:
        return self

    def remote(self, settings: EngineConfig, stages: Any) -> Scheduler:
        self.schedulers.append(Scheduler(self, settings))
        return self.last


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while True:
            if condition():
                return
            await asyncio.sleep(0)


def in_place_of_ray(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(link, "_remote", lambda actor_class: made)
    monkeypatch.setattr(ray, "kill", lambda scheduler: scheduler.die())
    monkeypatch.setattr(link, "create_stages", lambda *arguments: [])
    monkeypatch.setattr(link, "current_group", lambda: None)
    return made


def settings(**changes: Any) -> EngineConfig:
    return EngineConfig(StageSpec("none"), config(), **changes)
