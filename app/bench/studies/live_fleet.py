"""Live engines with roles in this process's Ray cluster, and fronts without HTTP before them."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.fleet.roles import build_way
from actors.fleet.routers import build_router
from actors.fleet.routers.base import Router
from actors.fleet.snapshot import Role
from actors.fleet.way_router import WayRouter
from app.bench.report import MeasurementError
from app.bench.studies.live_engine import NO_DRAFTS, local_cluster, read_args
from app.settings.model_folder import model_config
from app.simulate.hardware.interconnect import kv_bytes_of

if TYPE_CHECKING:  # they import Ray, which is imported where it is used
    from app.engine_client.live import LiveEngine
    from app.fleet.client import FleetClient
    from app.fleet.registry import Registry


class LiveFleet:
    """engines: by name, in order of their start. adapters: folders by slot."""

    def __init__(self, registry: Registry, model_path: str, adapters: Mapping[int, str]) -> None:
        self._registry = registry
        self._model_path = model_path
        self._adapters = adapters
        self.engines: dict[str, LiveEngine] = {}

    @asynccontextmanager
    async def front(
        self, router: Router, names: Collection[str] = ()
    ) -> AsyncGenerator[FleetClient, None]:
        """A new front of these engines, or of all. Raises MeasurementError if it lacks some."""
        from actors.transport.node_directory import this_node
        from app.fleet.client import FleetClient
        from app.fleet.finder import Finder

        names = names or self.engines
        finder = Finder(_part_of(self._registry, names), this_node())
        front = FleetClient(finder, "bench", self._model_path, router, adapters=self._adapters)
        await front.start()
        try:
            if front.num_engines != len(names):
                raise MeasurementError(f"{front.num_engines} of {len(names)} engines were found")
            yield front
        finally:
            await front.close()


def _part_of(registry: Registry, names: Collection[str]) -> Registry:
    """The registry as a front sees it that shall know these engines alone."""
    from app.fleet.registry import Registry

    class Part(Registry):
        async def ids(self) -> list[str]:
            return [name for name in await super().ids() if name.rpartition(".")[0] in names]

    part = Part("")
    part.__dict__.update(registry.__dict__)
    return part


@asynccontextmanager
async def live_fleet(
    args: Mapping[str, Any], roles: Mapping[str, Role], logs: Path | None = None
) -> AsyncGenerator[LiveFleet, None]:
    """`live_engines` on a Ray cluster of their own."""
    with local_cluster():
        async with live_engines(args, roles, logs) as fleet:
            yield fleet


@asynccontextmanager
async def live_engines(
    args: Mapping[str, Any], roles: Mapping[str, Role], logs: Path | None = None
) -> AsyncGenerator[LiveFleet, None]:
    """Start an engine for each name on this process's Ray cluster. logs: a folder where each writes
    its event log, in one of its name; complete once the engines have ended."""
    from app.engine_client.live import LiveEngine
    from app.fleet.registry import Member, Registry
    from app.settings.load import parse, resolve

    # A standby would start, on the same cores, while something is measured.
    found = resolve(parse({**args, "engine": {**(args.get("engine") or {}), "standby": False}}))
    registry = Registry(f"bench-{secrets.token_hex(4)}")
    fleet = LiveFleet(registry, found.stage.model_path, dict(found.adapters))
    try:
        for name, role in roles.items():
            config = replace(found, role=role.value)
            if logs is not None:
                config = replace(config, event_log=str(logs / name))
            member = Member(registry, name, tcp=False)
            fleet.engines[name] = LiveEngine(config, "bench", membership=member)
            await fleet.engines[name].start()
        yield fleet
    finally:
        for engine in fleet.engines.values():
            await engine.close()


def args_of(config: Path, tbt_ms: float, ttft_ms: float, shared_gib: float = 0.5) -> dict[str, Any]:
    """The settings of a Serve config's engines, for a fleet of this machine whose engines have a
    thread each, share KV, and draft nothing."""
    args = read_args(config)
    args.pop("listen", None)
    kv = {**(args.get("kv") or {}), "memory_gib": 1.0, "shared_cache_gib": shared_gib}
    return {
        **args,
        "fleet": {},
        "kv": kv,
        "parallel": {"threads_per_rank": 1},
        "slo": {"tbt_ms": tbt_ms, "ttft_ms": ttft_ms},
        **NO_DRAFTS,
    }


def block_bytes(args: Mapping[str, Any]) -> float:
    """Bytes of a block of KV in all layers of these settings' model."""
    from app.settings.load import parse, resolve

    stage = resolve(parse(args)).stage
    dtype = None if stage.dtype == "auto" else stage.dtype
    return stage.block_size * kv_bytes_of(model_config(stage.model_path), dtype)


def router_of(way: str) -> Router:
    """What a live front of this way routes by."""
    router = build_router("slack")
    return router if way == "colocated" else WayRouter(build_way(way, router))
