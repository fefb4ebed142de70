"""The stage actors of one replica: building, watching, killing and rebuilding them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Literal

import psutil
import ray

from actors.engine.config import CacheSizes, EngineConfig
from actors.executor.kv_tier import tier_specs
from actors.executor.placement import (
    cause_in_words,
    create_stages,
    current_group,
    find_stages,
    first_line,
    kill_stages,
    leave_loads,
    load_stages,
    processes_here,
    unused,
)
from actors.scheduling.events import KVMove, TierChange
from actors.scheduling.request import Grammar
from actors.stage.spec import StageInfo, TierSpec
from actors.transport.graph_pipeline import GraphPipeline, set_channel_bytes
from actors.transport.notices import notify
from actors.transport.pipeline import CallPipeline, OnAnswer, OnLost, Pipeline, StageHandles
from actors.transport.running_time import running_timeout

logger = logging.getLogger("legato.stages")

_REPORT_EVERY_S = 5.0
_SILENT_S = 30.0  # a stage that answers nothing for so long while it starts is hung
_PREPARE_LIMIT_S = 60.0
_MAX_STARTS = 3
_COMPILE_LIMIT_S = 30.0  # the first grammar also imports the compiler
_ADAPTER_LIMIT_S = 240.0  # a client waits longer than two loads that hang
_NO_STAGES = "there are no stages: they are being rebuilt"
_FOR_MEMORY_S = 3.0  # before calibration; what is left is backed while the engine is idle


class StagesFailed(Exception):
    """The stages could not be built; the message is theirs."""


class StageDied(StagesFailed):
    """A process died while starting or connecting, without an error: worth a retry."""


class StageSet:
    """Stages and the pipeline through them. `rebuild` makes a new set with equal KV sizes."""

    def __init__(self, config: EngineConfig, actors: StageHandles) -> None:
        """actors: [stage][rank], created but not loaded: the first set."""
        self._config = config
        self._listeners: tuple[OnAnswer, OnLost] | None = None
        self._on_standby_taken: Callable[[str], None] = lambda name: None
        self._actors = actors
        self.pipeline: Pipeline | None = None  # takes plans; None without stages
        self._sizes = CacheSizes(0, 0, 0)
        self._tier_specs: list[TierSpec] = []  # one per rank, if there is a second tier
        self.tier: tuple[tuple[bytes, ...], ...] = ()  # initial digests of each rank's store
        self.pids: list[list[int]] = []
        self.adapters = dict(config.adapters)  # folder by slot, of those that are loaded
        self._loads = asyncio.Lock()  # of adapters by `load_adapter`, one at a time
        self.here: list[psutil.Process] = []  # processes of the stages on this node
        self._standby: tuple[str, StageHandles] | None = None  # name, actors: for a rebuild

    async def build(self) -> tuple[StageInfo, CacheSizes]:
        """Load, size KV from memory, connect.

        Raises StagesFailed with the loader's message, which names a file or parameter.
        """
        num_starts = 1
        while True:
            try:
                return await self._build()
            except StageDied as death:
                if num_starts == _MAX_STARTS:
                    raise
                num_starts += 1
                notify(f"{death}: start {num_starts} of {_MAX_STARTS}")

    async def _build(self) -> tuple[StageInfo, CacheSizes]:
        info, self._sizes = await self._load()
        self._tier_specs = await tier_specs(self._config, info)
        await self._open(in_haste=self._config.is_rebuild)
        return info, self._sizes

    def stand_by(self, name: str | None) -> None:
        """Use these stages, which the replica has created, for the next rebuild; None: no longer.

        Raises ValueError if they are not there.
        """
        self._standby = None if name is None else (name, find_stages(self._config, name))

    @property
    def standby(self) -> Literal["none", "starting", "ready"]:
        """none: disabled."""
        if not self._config.standby:
            return "none"
        return "ready" if self._standby else "starting"

    def listen(
        self,
        on_answer: OnAnswer,
        on_lost: OnLost,
        on_standby_taken: Callable[[str], None] | None = None,
    ) -> None:
        """Set the callbacks of this pipeline and of later ones."""
        self._listeners = (on_answer, on_lost)
        self._on_standby_taken = on_standby_taken or (lambda name: None)
        if self.pipeline is not None:
            self.pipeline.listen(on_answer, on_lost)

    async def rebuild(self) -> None:
        """Kill the remaining stages, and build new ones, from the standby if there is one."""
        self.close()
        # Kill directly, because Ray waits five seconds for a stopped process.
        for process in self.here:
            with contextlib.suppress(psutil.Error):
                process.kill()
        await self._load(is_rebuild=True)
        await self._open()

    async def _load(self, is_rebuild: bool = False) -> tuple[StageInfo, CacheSizes]:
        if is_rebuild and self._standby is not None:
            (name, standby), self._standby = self._standby, None
            self._on_standby_taken(name)
            self._actors = await unused(standby)
        if not self._actors:
            self._actors = create_stages(self._config, current_group())
        flat = self._flat()
        reporter = asyncio.create_task(self._report(flat))
        try:
            async with running_timeout(self._config.load_timeout_s):
                infos = await load_stages(self._actors)
            pids = await asyncio.gather(*[actor.pid.remote() for actor in flat])
            each = iter(pids)
            self.pids = [[next(each) for _ in ranks] for ranks in self._actors]
            self.here = await processes_here(flat, pids)
            for slot, folder in list(self.adapters.items()):
                problem = await self._fill_slot(slot, folder)
                if problem is not None and not (is_rebuild or self._config.is_rebuild):
                    raise StagesFailed(problem)
                if problem is not None:  # only the adapter's own requests fail
                    del self.adapters[slot]
                    logger.error("adapter slot %d is lost: %s", slot, problem)
            return infos[0], self._config.cache_sizes(infos, is_rebuild=is_rebuild)
        except Exception as error:  # of any type: stages that are half loaded serve nothing
            self._kill_actors()
            if isinstance(error, TimeoutError):
                limit = f"{self._config.load_timeout_s:.0f} s"
                raise StagesFailed(f"loading took over {limit}") from error
            if isinstance(error, ray.exceptions.RayTaskError | ValueError):
                raise StagesFailed(cause_in_words(error)) from error
            if isinstance(error, ray.exceptions.RayError):
                raise StageDied(f"a stage died while loading: {type(error).__name__}") from error
            raise
        finally:
            reporter.cancel()

    async def _report(self, flat: list[Any]) -> None:
        """Log the progress of the slowest rank, since large models take minutes; kill stages that
        do not answer: what waits for them then fails."""
        while True:
            await asyncio.sleep(_REPORT_EVERY_S)
            try:
                async with running_timeout(_SILENT_S):
                    shares = await asyncio.gather(*[a.loading_progress.remote() for a in flat])
            except ray.exceptions.RayError:
                return  # load() raises the error
            except TimeoutError:
                logger.error("a stage does not answer while it starts: killing all")
                kill_stages([flat])
                return
            if min(shares) < 1.0:
                logger.info("loading weights: %.0f %%", 100 * min(shares))

    async def _open(self, in_haste: bool = True) -> None:
        """in_haste: leave the first grammar, and waiting for memory, for later."""
        flat = self._flat()
        pipeline = self._make_pipeline()
        reporter = asyncio.create_task(self._report(flat))
        try:
            async with running_timeout(self._config.load_timeout_s):
                await asyncio.gather(*[actor.allocate.remote(*self._sizes) for actor in flat])
                if self._config.grammars and not in_haste:  # while memory is made ready
                    with contextlib.suppress(StagesFailed):  # there are none without a tokenizer
                        await self.compile_grammar(Grammar("json_object", ""))
                wait_s = 0.0 if in_haste else _FOR_MEMORY_S
                await asyncio.gather(*[actor.settle.remote(wait_s) for actor in flat])
                self.tier = await self._open_tier()
                await pipeline.open()
        except Exception as error:  # e.g. of Ray, sockets or disks
            pipeline.close()
            self._actors = []
            if isinstance(error, StagesFailed):
                raise
            if isinstance(error, ray.exceptions.RayTaskError):
                raise StagesFailed(cause_in_words(error)) from error
            message = f"the stages could not be connected: {type(error).__name__}: {error}"
            has_died = isinstance(error, ray.exceptions.ActorDiedError)
            raise (StageDied if has_died else StagesFailed)(message) from error
        finally:
            reporter.cancel()
        self.pipeline = pipeline
        if self._listeners is not None:
            pipeline.listen(*self._listeners)

    async def _open_tier(self) -> tuple[tuple[bytes, ...], ...]:
        """Raises RayTaskError naming an invalid setting; a rebuild goes on without an unusable
        disk.
        """
        flat, specs = self._flat(), self._tier_specs
        self._tier_specs = [replace(spec, is_first_start=False) for spec in specs]
        pairs = zip(flat, specs, strict=False)  # of all ranks, or of none
        return tuple(await asyncio.gather(*[actor.open_tier.remote(s) for actor, s in pairs]))

    async def move(self, move: KVMove) -> list[tuple[int, TierChange]]:
        """`StageActor.move` on every rank. Raises StagesFailed."""
        flat = self._flat()
        try:
            return await asyncio.gather(*[actor.move.remote(move) for actor in flat])
        except ray.exceptions.RayError as error:
            raise StagesFailed(f"a move of KV failed: {type(error).__name__}") from error

    def _make_pipeline(self) -> Pipeline:
        config, depth = self._config, self._config.scheduler.depth
        if config.transport == "graph":
            set_channel_bytes(config.channel_bytes)
            return GraphPipeline(self._actors, depth, config.accelerator)
        return CallPipeline(self._actors, depth)

    async def compile_grammar(self, grammar: Grammar) -> str | None:
        """`StageActor.compile_grammar` on the last stage. Raises StagesFailed, also when late."""
        try:
            async with running_timeout(_COMPILE_LIMIT_S):
                return await self._flat(-1)[0].compile_grammar.remote(grammar)
        except ray.exceptions.RayError as error:
            raise StagesFailed(first_line(error)) from error
        except TimeoutError as error:
            raise StagesFailed(f"grammar not compiled within {_COMPILE_LIMIT_S:.0f} s") from error

    async def load_adapter(self, slot: int, folder: str) -> str | None:
        """Fill a slot that no request uses; returns an error message or None.

        Raises StagesFailed also during a rebuild, which fills the slots as they were at its start.
        """
        async with self._loads:
            if (pipeline := self.pipeline) is None:
                raise StagesFailed(_NO_STAGES)
            self.adapters.pop(slot, None)
            try:
                problem = await self._fill_slot(slot, folder)
            except ray.exceptions.RayError as error:
                raise StagesFailed(first_line(error)) from error
            if self.pipeline is not pipeline:  # what was filled is gone
                raise StagesFailed(_NO_STAGES)
            if problem is None:
                self.adapters[slot] = folder
            return problem

    async def _fill_slot(self, slot: int, folder: str) -> str | None:
        """An error message, also when late, or None."""
        flat, limit_s = self._flat(), min(self._config.load_timeout_s, _ADAPTER_LIMIT_S)
        try:
            async with running_timeout(limit_s):
                problems = await asyncio.gather(
                    *[actor.load_adapter.remote(slot, folder) for actor in flat]
                )
        except TimeoutError:
            await leave_loads(flat)
            return f"{folder}: not loaded within {limit_s:.0f} s"
        return next((problem for problem in problems if problem is not None), None)

    def _flat(self, begin: int = 0) -> list[Any]:
        """The ranks of all stages from `begin` on. Raises StagesFailed while there are none."""
        if not self._actors:
            raise StagesFailed(_NO_STAGES)
        return [actor for ranks in self._actors[begin:] for actor in ranks]

    async def prepare(self, grammars: Collection[Grammar]) -> None:
        """Compile the grammars of the next steps. Raises StagesFailed.

        The first grammar of a stage imports the compiler, which takes seconds: within a step this
        would delay every stream, and the stage would be taken for hung.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PREPARE_LIMIT_S):
                for grammar in grammars:
                    await self.compile_grammar(grammar)

    def close(self) -> None:
        pipeline, self.pipeline = self.pipeline, None
        if pipeline is not None:
            pipeline.close()
        else:
            self._kill_actors()
        self._actors = []

    def _kill_actors(self) -> None:
        kill_stages(self._actors)
        self._actors = []
