"""The deployments of a fleet: fronts hold the clients' connections, engines compute tokens.

A front's streams outlive the engine that computes them, so its clients notice neither an engine's
death nor its leaving. Both deployments are of one application; the front is its ingress.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from actors.fleet.routers import build_router
from actors.fleet.scaling import load_of
from actors.gc_utils import freeze_gc_heap
from app.engine.link import EngineFailed
from app.engine.live import LiveEngine
from app.fleet.client import FleetClient
from app.fleet.finder import Finder
from app.fleet.registry import Member, Registry, this_node
from app.replica import HttpReplica, load_text
from app.server import FOR_STREAMS
from app.settings import FleetSettings, parse, resolve

logger = logging.getLogger("legato.fleet")

_CONFIRM_PERIOD_S = 10.0


@serve.deployment(name="Front", max_surge_percent=100, **FOR_STREAMS)
@serve.ingress()
class Front(HttpReplica):
    """args: the YAML's `args` (schema: `app.settings.Settings`). engines: the other deployment, so
    that Serve starts it; nothing is called through it."""

    engine: FleetClient

    async def __init__(  # type: ignore[misc]  # Serve awaits
        self, args: Mapping[str, Any], engines: DeploymentHandle
    ) -> None:
        self.settings = parse(args)
        fleet = self.settings.fleet or FleetSettings()
        config = resolve(self.settings)
        folder = config.stage.model_path
        name = self.settings.model.name or Path(folder).name
        self.engine = FleetClient(
            Finder(_registry(), this_node()),
            name,
            folder,
            build_router(fleet.routing, fleet.routing_options),
            start_within_s=fleet.start_within_s,
            resume_within_s=fleet.resume_within_s,
            allow_inexact=fleet.allow_inexact,
            request_deadline_s=config.request_deadline_s,
        )
        self.text = await asyncio.to_thread(load_text, folder, self.settings.model)
        await self.engine.start()
        await self.open(config, name)
        freeze_gc_heap()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self.api

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """A fleet's settings are changed where they act: `user_config` of `Engine`."""
        if user_config:
            raise ValueError("user_config: belongs to the deployment Engine")

    async def __del__(self) -> None:
        await self.close()


@serve.deployment(name="Engine", max_surge_percent=100, **FOR_STREAMS)
class Engine:
    """The owner of one engine: its scheduler and stages live in this replica's placement group."""

    async def __init__(self, args: Mapping[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits
        settings = parse(args)
        fleet = settings.fleet or FleetSettings()
        config = dataclasses.replace(resolve(settings), grammars=True)
        name = settings.model.name or Path(config.stage.model_path).name
        replica = serve.get_replica_context().replica_id.unique_id
        tcp = {"always": True, "never": False}.get(fleet.tcp)
        self.member = Member(_registry(), replica, tcp)
        self.engine = LiveEngine(config, name, membership=self.member)
        await self.engine.start()
        self.confirming = asyncio.create_task(self._confirm())
        freeze_gc_heap()

    async def _confirm(self) -> None:
        while True:
            await asyncio.sleep(_CONFIRM_PERIOD_S)
            try:
                await self.member.confirm()
            except Exception as error:  # the cluster's store is away: it comes back, or all ends
                logger.warning("telling the fleet of this engine: %s", error)

    async def check_health(self) -> None:
        """Fails when the engine is beyond repair, so that Serve replaces the replica."""
        if self.engine.failure is not None:
            raise EngineFailed(self.engine.failure)

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """`user_config` changes policy, budget, objectives live; keys of `scheduling`, `slo`."""
        if user_config:
            await self.engine.reconfigure(user_config)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What `app.fleet.autoscaling` reads."""
        snapshot = self.engine.snapshot
        return {} if snapshot is None else load_of(snapshot, time.time()).to_stats()

    async def status(self) -> Mapping[str, Any]:
        """A snapshot of this engine."""
        return await self.engine.status()

    async def __del__(self) -> None:
        confirming = getattr(self, "confirming", None)
        if confirming is not None:
            confirming.cancel()
        engine = getattr(self, "engine", None)
        if engine is not None:
            await engine.leave()
            await engine.close()


def _registry() -> Registry:
    return Registry(serve.get_replica_context().app_name)
