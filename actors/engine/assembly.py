"""Assembles a scheduler process: stages, core, connections, and the loop that links them."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil

from actors.calibration.probe import PipelineProbe, ProbeFailed
from actors.calibration.start import calibrate_at_start, keep_learnt, with_model
from actors.engine.config import CacheSizes, EngineConfig
from actors.engine.loop import EngineLoop
from actors.engine.peers import FrontAddress
from actors.executor.bit_class import bit_class_of
from actors.executor.kv_tier import root_of_shares
from actors.executor.stage_set import StageSet, StagesFailed
from actors.fleet.publish import Publisher
from actors.fleet.snapshot import Role
from actors.scheduling.build import build_core
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.core import Core
from actors.scheduling.event_log import Recorder
from actors.stage.spec import StageInfo
from actors.transport.gc_utils import freeze_gc_heap
from actors.transport.messages import Welcome
from actors.transport.shares import remove_unheld
from actors.transport.time_slices import shorten_time_slices

if TYPE_CHECKING:
    from actors.engine.event_recorder import EventLog

logger = logging.getLogger("legato.scheduler")

_LIFE_EVERY_S = 1.0


class Engine:
    """One per scheduler actor. All state belongs to the running event loop."""

    def __init__(self, config: EngineConfig, stages: list[list[Any]]) -> None:
        """stages: actors [stage][rank], created but not loaded."""
        self._config = config
        self._stages = StageSet(config, stages)
        self._events: EventLog | None = None
        self._calibrated: StageInfo | None = None  # set if the engine measured its own cost model
        self._finished = asyncio.Event()
        self._dying: list[psutil.Process] = []  # the ranks of this node, once the engine ends

    async def start(
        self, socket_path: str, fronts: FrontAddress | None = None
    ) -> tuple[StageInfo, int, str | None]:
        """See `SchedulerActor.start`."""
        life = asyncio.create_task(_show_life(socket_path))
        try:
            return await self._start(socket_path, fronts)
        finally:
            life.cancel()

    async def _start(
        self, socket_path: str, fronts: FrontAddress | None
    ) -> tuple[StageInfo, int, str | None]:
        info, sizes = await self._stages.build()
        num_blocks, chosen = sizes.num_blocks, self._config.scheduler_on(info.backend)
        scheduler = replace(
            chosen,
            num_blocks=num_blocks,
            num_host_blocks=sizes.num_host_blocks,
            max_requests=min(chosen.max_requests, sizes.num_requests),
            request_slots=sizes.num_requests,
            num_saved_states=_num_saved_states(chosen, sizes),
            max_model_len=self._max_model_len(info, num_blocks, fronts is not None),
            tier_ranks=len(self._stages.tier),
            tier_shared=self._config.kv.shared_cache_gib > 0,
        )
        if self._config.calibrate and scheduler.cost_model is None:
            scheduler = await self._calibrate(scheduler, info)
        if self._config.role == Role.PREFILL:
            scheduler = scheduler.handing_over()
        core = build_core(scheduler)
        info = replace(info, max_model_len=scheduler.max_model_len)
        publisher = None
        if fronts is not None:
            bits = await bit_class_of(self._config.stage, info)
            adapters = tuple(sorted(self._stages.adapters.items()))
            role = Role(self._config.role)
            publisher = Publisher(fronts.engine_id, bits, core, adapters, role)
        handle = core.handle
        if self._config.event_log is not None:
            from actors.engine.event_recorder import open_log  # imports pyarrow

            self._events = open_log(self._config.event_log, self._config.event_log_bytes)
        if self._events is not None:
            handle = Recorder(core, self._events.write).handle
        loop = EngineLoop(
            self._config, core, handle, self._stages, publisher, lambda: self._end(loop, core)
        )
        await loop.peers.connect_owner(socket_path)
        address = None
        if fronts is not None:
            address = await _serve_fronts(loop, fronts, info, num_blocks)
        freeze_gc_heap()
        shorten_time_slices()
        logger.info("ready: %s backend, %d KV blocks", info.backend, num_blocks)
        return info, num_blocks, address

    async def finished(self) -> None:
        """Returns when the replica has closed its socket and the stages have ended."""
        await self._finished.wait()
        # It stops the loop for seconds, so it comes last: the sockets of fronts are closed by now.
        if self._config.kv.shared_cache_gib:
            remove_unheld(root_of_shares(self._config), after=self._dying)

    def _max_model_len(self, info: StageInfo, num_blocks: int, in_fleet: bool) -> int:
        try:
            return self._config.max_model_len(info, num_blocks, in_fleet=in_fleet)
        except ValueError as error:
            raise StagesFailed(str(error)) from error

    async def _calibrate(self, scheduler: SchedulerConfig, info: StageInfo) -> SchedulerConfig:
        """The settings, with a measured cost model if possible."""
        if self._stages.pipeline is None:
            return scheduler
        probe = PipelineProbe(self._stages.pipeline.submit)
        self._stages.listen(probe.answered, probe.lost)
        try:
            found = await calibrate_at_start(self._config, scheduler, info, probe.run)
        except ProbeFailed as error:
            raise StagesFailed(f"measuring steps: {error}") from error
        if found is None:
            return scheduler
        self._calibrated = info
        return with_model(self._config, scheduler, found.model)

    def _end(self, loop: EngineLoop, core: Core) -> None:
        """End the engine, because the socket of the replica that owns it has closed."""
        # First close the event log: it is unreadable if incomplete, and ending stages may fail.
        loop.peers.close_fronts()
        try:
            if self._events is not None:
                self._events.close()
            if self._calibrated is not None:
                keep_learnt(self._config, self._calibrated, core.cost_model)
            self._dying = self._stages.here  # ranks of other nodes have shares of their own there
            self._stages.close()
        finally:
            self._finished.set()


def _num_saved_states(scheduler: SchedulerConfig, sizes: CacheSizes) -> int | None:
    """As many as there are requests (`actors.stage.states`), if prompts may begin with them."""
    if scheduler.num_saved_states is None:
        return None
    return sizes.num_requests if scheduler.prefix_cache else 0


async def _show_life(socket_path: str) -> None:
    """Touch the replica's socket, which shows that this process does something while it starts."""
    while True:
        os.utime(socket_path)
        await asyncio.sleep(_LIFE_EVERY_S)


async def _serve_fronts(
    loop: EngineLoop, fronts: FrontAddress, info: StageInfo, num_blocks: int
) -> str | None:
    """Let fronts connect; returns the TCP address, if there is one."""
    publication = loop.publication
    assert publication is not None
    about = (info.vocab_size, info.eos_token_ids, num_blocks)

    def welcome(number: int) -> Welcome:
        asyncio.get_running_loop().call_soon(publication.publish, number)
        return Welcome(number, time.monotonic(), *about)

    publication.start()
    return await loop.peers.listen(fronts, welcome)
