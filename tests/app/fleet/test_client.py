"""What a front says of its model, as engines come, change and go."""

from __future__ import annotations

from typing import Any

from actors.fleet.routers import build_router
from actors.fleet.snapshot import EngineState
from actors.transport.messages import Welcome
from app.fleet.client import FleetClient
from app.fleet.connection import Connection
from app.fleet.registry import EngineEntry
from tests.actors.fleet.pictures import snapshot


class Finder:
    """Finds no engine by itself."""

    def refresh(self) -> None: ...


def front() -> FleetClient:
    finder: Any = Finder()
    return FleetClient(finder, "name", "folder", build_router("slack"))


def joined(client: FleetClient, name: str) -> Connection:
    """A connection to this engine, which is open and has sent nothing but its welcome."""
    connection = Connection(EngineEntry(name, "node", "@", None, b"", 1), "node", client)
    connection.welcome = Welcome(1, 0.0, 11, (2,), 100)
    unused: Any = object()
    connection._socket = unused  # it is open; nothing is sent
    client.joined(connection)
    return connection


def test_a_request_may_have_what_one_of_the_engines_holds() -> None:
    """Of 4096 tokens of context: more would be refused by every engine."""
    client = front()
    connections = {name: joined(client, name) for name in ("small", "large")}

    def published(name: str, sequence: int, **changes: Any) -> int:
        blocks = {"small": 100, "large": 200}[name]
        fields = {"num_blocks": blocks, "max_model_len": 4096, "sequence": sequence, **changes}
        client.published(connections[name], snapshot(name, **fields))
        return client.card.max_model_len

    assert published("small", 1) == 1600
    assert published("large", 1) == 3200
    assert published("small", 2) == 3200
    assert published("large", 2, state=EngineState.DRAINING) == 1600  # it takes no new request
    assert published("large", 3, num_blocks=1000) == 4096
    client.lost(connections["large"])
    assert client.card.max_model_len == 1600
    assert published("small", 3, state=EngineState.STARTING) == 1600
    client.lost(connections["small"])
    assert client.card.max_model_len == 1600  # of an engine that is started for a request
    assert client.card.vocab_size == 11
