"""A front between engines made of paper; nothing travels by itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from actors.engine.peers import first_id
from actors.fleet.routers import build_router
from actors.scheduling.request import SamplingParams
from actors.transport.messages import Welcome, pack_kind, unpack_kind
from app.engine_client.client import GenerationRequest
from app.fleet.client import FleetClient
from app.fleet.connection import Connection
from app.fleet.registry import EngineEntry
from tests.actors.engine.paper_engine import Engine


class Finder:
    """Finds no engine by itself."""

    def lost(self, engine_id: str) -> None: ...

    async def outnumbered(self, num_own: Callable[[], int]) -> None: ...


def front(router: str = "slack", **options: Any) -> FleetClient:
    finder: Any = Finder()
    return FleetClient(finder, "name", "folder", build_router(router), **options)


class Wire:
    """A socket between a front and a paper engine: `carry` takes what was sent to the other end."""

    def __init__(self, client: FleetClient, name: str, number: int, **changes: Any) -> None:
        self.engine = Engine(engine_id=name, **changes)
        self.frames: list[bytes] = []
        self.number = number
        self.connection = Connection(EngineEntry(name, "node", "@", None, b"", 1), "node", client)
        socket: Any = self
        self.connection._socket = socket
        self.connection.welcome = Welcome(number, 0.0, 11, (2,), 100)
        self.connection._ids = itertools.count(first_id(number) + 1)
        client.joined(self.connection)
        publication = self.engine.loop.publication
        assert publication is not None
        publication.publish()

    def send(self, frame: bytes) -> None:
        self.frames.append(frame)

    def carry(self) -> bool:
        """Whether anything was sent."""
        engine = self.engine
        sent, engine.wires.sent = engine.wires.sent, []
        for _, message in sent:
            self.connection._received(pack_kind(message))
        frames, self.frames = self.frames, []
        for frame in frames:
            engine.wires.receive(self.number, unpack_kind(frame))
        return bool(sent or frames)


async def ask(client: FleetClient, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    request = GenerationRequest(f"of {prompt}", prompt, SamplingParams(num_tokens))
    return [token async for chunk in client.generate(request) for token in chunk.tokens]
