"""Fleets in this test process: real schedulers and stages, a real registry, and their front."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from actors.fleet.roles import build_way
from actors.fleet.routers import build_router
from actors.fleet.snapshot import Role
from actors.fleet.way_router import WayRouter
from actors.transport.node_directory import this_node
from app.engine_client.live import LiveEngine
from app.fleet.client import FleetClient
from app.fleet.finder import Finder
from app.fleet.registry import Member, Registry
from app.settings.load import parse, resolve
from tests.app.fleet.live.waiting import until

SHARE_BYTES = 4 << 20
# So slow a model that fetching always beats computing: what is asked is not how fast either is.
_SLOW = "{name: slow, tokens_s: [[1, 1.0], [64, 64.0]]}"


@dataclass(slots=True)
class LiveFleet:
    """`engines` in order of their start; `front` knows them all once `add` has returned."""

    folder: Path
    sections: dict[str, Any]
    registry: Registry
    front: FleetClient
    engines: list[LiveEngine] = field(default_factory=list)

    async def add(self, role: Role = Role.BOTH, **membership: Any) -> LiveEngine:
        settings = parse({"model": {"path": str(self.folder)}, **self.sections})
        member = Member(self.registry, f"replica-{len(self.engines)}", **membership)
        config = replace(resolve(settings), role=role.value)
        engine = LiveEngine(config, "tiny", membership=member)
        await engine.start()
        self.engines.append(engine)
        self.front._finder.refresh()  # which would look by itself within a second
        await until(lambda: self.front.num_engines == len(self.engines))
        return engine

    async def pid(self, number: int) -> int:
        """Of that engine's scheduler."""
        return int((await self.engines[number].status())["pid"])


@pytest.fixture
def sections(tmp_path: Path) -> dict[str, Any]:
    """Of engines that share KV."""
    (tmp_path / "slow.yaml").write_text(_SLOW)
    kv = {"block_size": 4, "memory_gib": 0.01, "shared_cache_gib": SHARE_BYTES / 2**30}
    scheduling = {"max_requests": 64, "token_budget": 64}
    return {
        "kv": {**kv, "shared_cache_path": str(tmp_path)},
        "scheduling": {**scheduling, "cost_model": str(tmp_path / "slow.yaml")},
        "engine": {"standby": False},
        "fleet": {},
    }


@pytest.fixture
async def make_fleet(
    ray_cluster: None, tiny_model: Callable[..., Path]
) -> AsyncIterator[Callable[..., Any]]:
    """`await make_fleet(num_engines, routing="round_robin", scheduling={...})`; with `way` an
    engine for each of `roles`."""
    async with AsyncExitStack() as at_end:

        async def make(
            num_engines: int,
            folder: Path | None = None,
            routing: str = "round_robin",
            front: dict[str, Any] | None = None,
            way: str = "",
            roles: Sequence[Role] = (),
            **sections: dict[str, Any],
        ) -> LiveFleet:
            sections.setdefault("kv", {"block_size": 4, "memory_gib": 0.01})
            sections.setdefault("scheduling", {"max_requests": 64, "token_budget": 64})
            registry = Registry(f"test-{secrets.token_hex(4)}")
            path = folder or tiny_model("llama")
            router = build_router(routing)
            if way:
                router = WayRouter(build_way(way, router))
                sections.setdefault("fleet", {})
            client = FleetClient(
                Finder(registry, this_node()),
                "tiny",
                str(path),
                router,
                **{"rebalance": False, **(front or {})},
            )
            fleet = LiveFleet(path, sections, registry, client)
            at_end.push_async_callback(client.close)
            await client.start()
            for role in roles or [Role.BOTH] * num_engines:
                at_end.push_async_callback((await fleet.add(role)).close)
            return fleet

        yield make
