"""The deployments of a fleet: fronts handle clients, engines compute tokens.

A front's streams survive the engine that computes them, so clients notice neither the death of an
engine nor its removal. Both deployments belong to one application; the front is its ingress.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from actors.engine.config import EngineConfig
from actors.fleet.roles import build_way
from actors.fleet.routers import build_router
from actors.fleet.scaling import load_of
from actors.fleet.way_router import WayRouter
from actors.transport.gc_utils import freeze_gc_heap
from actors.transport.node_directory import this_node
from actors.transport.notices import notify
from actors.transport.time_slices import shorten_time_slices
from app.engine_client.link import EngineFailed
from app.engine_client.live import LiveEngine
from app.fleet.adapters import FleetAdapters
from app.fleet.client import FleetClient
from app.fleet.finder import Finder
from app.fleet.registry import Member, Registry, registry_of
from app.handle_calls import ServedModel
from app.paths import version
from app.replica import HttpReplica, load_text
from app.server import FOR_STREAMS
from app.settings.fleet import FleetSettings
from app.settings.load import parse, resolve
from app.settings.models import served_name
from app.settings.schema import Settings
from app.telemetry.engines import FrontEngines
from app.user_config import UserConfig

logger = logging.getLogger("legato.fleet")

_CONFIRM_PERIOD_S = 10.0
_SUCCEEDED_PERIOD_S = 0.5
_NO_USER_CONFIG = "user_config: belongs to the deployment Engine"


class FrontServer(HttpReplica):
    """each: the `args` of every model (`app.settings.models.expand`). fleets: the names under which
    their engines are found. engines: passed only so that Serve starts them."""

    engines: Sequence[FleetClient]
    fleet_adapters: Sequence[FleetAdapters] = ()
    is_serving = False

    async def __init__(  # type: ignore[misc]  # Serve awaits
        self, each: Sequence[Mapping[str, Any]], fleets: Sequence[str], *engines: DeploymentHandle
    ) -> None:
        parsed = [parse(args) for args in each]
        configs = [resolve(settings) for settings in parsed]
        self.settings = parsed[0]
        sections = {served_name(settings): settings.adapters for settings in parsed}
        clients, controls, self.models = [], [], {}
        for settings, config, fleet in zip(parsed, configs, fleets, strict=True):
            serves = await asyncio.to_thread(served_by, settings, config)
            client = _client(settings, config, fleet, serves)
            clients.append(client)
            folder = config.stage.model_path
            text = await asyncio.to_thread(load_text, folder, settings.model)
            adapters = None
            if (slots := settings.adapters) is not None:
                folders = dict(zip(slots.paths, dict(config.adapters).values(), strict=True))
                adapters = FleetAdapters(
                    client, _registry(fleet), slots.max_adapters, folders, sections
                )
                controls.append(adapters)
            self.models[client.name] = ServedModel(client, text, adapters)
        self.engines, self.fleet_adapters = clients, controls
        for control in controls:
            control.beside = [other for other in controls if other is not control]
            control.start()
        await asyncio.gather(*[client.start() for client in clients])
        await self.open(configs)
        freeze_gc_heap()
        shorten_time_slices()

    async def _metrics(self, request: Request) -> Response:
        for client in self.engines:
            moves = client.moves
            engines = FrontEngines(client.snapshots, moves.num_moves, moves.num_losses)
            self.telemetry[client.name].show_engines(engines)
        return await super()._metrics(request)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self.api

    async def reconfigure(self, user_config: Mapping[str, Any] | None, rank: Any = None) -> None:
        """A fleet's settings are in `user_config` of `Engine`. Called first as the replica starts,
        for the sake of `rank`: it then raises ValueError. Later that is only told of, as in
        `app.user_config.UserConfig`."""
        is_serving, self.is_serving = self.is_serving, True
        if user_config and not is_serving:
            raise ValueError(_NO_USER_CONFIG)
        if user_config:
            notify(f"user_config is not applied: {_NO_USER_CONFIG}")

    async def __del__(self) -> None:
        for control in self.fleet_adapters:
            control.close()
        await self.close()


Front = serve.deployment(
    serve.ingress()(FrontServer), name="Front", max_surge_percent=100, **FOR_STREAMS
)
FRONT_WITHOUT_ROUTES = serve.deployment(
    FrontServer, name="Front", max_surge_percent=100, **FOR_STREAMS
)


@serve.deployment(name="Engine", max_surge_percent=100, **FOR_STREAMS)
class EngineReplica:
    """The owner of one engine: its scheduler and stages live in this replica's placement group.

    fleet_name: under which fronts find it. role: of `actors.fleet.snapshot.Role`.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits
        self, args: Mapping[str, Any], fleet_name: str, role: str
    ) -> None:
        settings = parse(args)
        fleet = settings.fleet or FleetSettings()
        config = dataclasses.replace(resolve(settings), grammars=True, role=role)
        name = served_name(settings)
        replica = serve.get_replica_context().replica_id.unique_id
        serves = await asyncio.to_thread(served_by, settings, config)
        self.member = Member(_registry(fleet_name), replica, fleet.listens_for_nodes, serves)
        self.engine = LiveEngine(config, name, membership=self.member)
        self.user_config = UserConfig(self.engine, config.scheduler)
        await self.engine.start()
        self.confirming = asyncio.create_task(self._confirm())
        freeze_gc_heap()

    async def _confirm(self) -> None:
        while True:
            await asyncio.sleep(_CONFIRM_PERIOD_S)
            try:
                await self.member.confirm()
            except Exception as error:  # the cluster's store is down: try again later
                logger.warning("telling the fleet of this engine: %s", error)

    async def check_health(self) -> None:
        """Fails when the engine is beyond repair, so that Serve replaces the replica."""
        if self.engine.failure is not None:
            raise EngineFailed(self.engine.failure)

    async def reconfigure(self, user_config: Mapping[str, Any] | None, rank: Any = None) -> None:
        """`user_config` changes policy, budget, objectives live; keys of `scheduling`, `slo`. For
        the sake of `rank`, Serve also calls it where there is none, and where there no longer is.
        """
        await self.user_config.apply(user_config)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The load that `app.fleet.autoscaling` reads."""
        return stats_of(self.engine, time.time())

    async def status(self) -> Mapping[str, Any]:
        """A snapshot of this engine."""
        return await self.engine.status()

    async def __del__(self) -> None:
        engine = getattr(self, "engine", None)
        if engine is not None:
            with suppress(Exception):  # the cluster's store is down, or the engine has failed
                await until_succeeded(engine, self.member, _succeeded_within_s())
        confirming = getattr(self, "confirming", None)  # until now: fronts still rely on the entry
        if confirming is not None:
            confirming.cancel()
        if engine is not None:
            await engine.leave()
            await engine.close()


async def until_succeeded(engine: LiveEngine, member: Member, within_s: float) -> None:
    """Returns once no front needs this engine any more: another model has replaced its own, and
    Serve replaces fronts and engines independently. Fronts of its model have no other engine."""
    end_s = time.monotonic() + within_s
    while time.monotonic() < end_s and await member.is_replaced():
        if not (await engine.status())["num_fronts"]:
            return
        await asyncio.sleep(_SUCCEEDED_PERIOD_S)


def _succeeded_within_s() -> float:
    """The rest of the time that Serve grants is for the streams to end."""
    return serve.get_replica_context()._deployment_config.graceful_shutdown_timeout_s / 2


def stats_of(engine: LiveEngine, now_s: float) -> dict[str, float]:
    """Its load; while its scheduler or its stages are replaced, the last one as not serving."""
    snapshot = engine.snapshot
    if snapshot is None:
        return {}
    load = load_of(snapshot, now_s)
    return (load if engine.is_ready() else dataclasses.replace(load, accepts=0.0)).to_stats()


def served_by(settings: Settings, config: EngineConfig) -> str:
    """`EngineEntry.serves`. Fronts of a model work only with its engines: both read the tokenizer,
    and answers name the model. Neither weights, which fronts may lack, nor where they lie, nor what
    may change beside equal tokens (chat template, adapters, settings) are in it."""
    digest = hashlib.sha256()
    for name in ("tokenizer.json", "tokenizer.model"):  # the second counts where it is alone
        with suppress(FileNotFoundError):
            digest.update(Path(config.stage.model_path, name).read_bytes())
            break
    return f"{served_name(settings)} ({digest.hexdigest()[:12]}), Legato {version()}"


def _client(settings: Settings, config: EngineConfig, fleet_name: str, serves: str) -> FleetClient:
    """This front's client of one model's engines."""
    fleet = settings.fleet or FleetSettings()
    router = build_router(fleet.routing, fleet.routing_options)
    if len(fleet.roles) > 1:
        router = WayRouter(build_way(fleet.way, router, fleet.way_options))
    return FleetClient(
        Finder(_registry(fleet_name), this_node(), serves),
        served_name(settings),
        config.stage.model_path,
        router,
        start_within_s=fleet.start_within_s,
        resume_within_s=fleet.resume_within_s,
        allow_inexact=fleet.allow_inexact,
        sleeps=fleet.sleeps,
        rebalance=fleet.rebalance,
        request_deadline_s=config.request_deadline_s,
        adapters=dict(config.adapters),
        order=config.scheduler.order,
    )


def _registry(fleet_name: str) -> Registry:
    """The registry of one model's engines."""
    return registry_of(serve.get_replica_context().app_name, fleet_name)
