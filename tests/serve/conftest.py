"""Servers that several modules of this room call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.ports import free_port
from tests.serve.fleet_streams import Streams, wait_for_engines
from tests.serve.server_process import running
from tests.tiny_models import LASTING

if TYPE_CHECKING:
    from tests.serve.live_server import LiveServer


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`with serve(args) as server`: `legato serve` in a process of its own."""

    def start(args: dict[str, Any], **deployment: Any) -> Any:
        return running(tmp_path_factory.mktemp("serve"), args, **deployment)

    return start


@pytest.fixture(scope="session")
def served_fleet(serve: Callable[..., Any], tiny_model: Callable[..., Path]) -> Iterator[Any]:
    """A front and two engines, in processes of their own."""
    args = {
        "model": {"path": str(tiny_model("llama", **LASTING))},
        "kv": {"memory_gib": 0.01, "block_size": 4},
        "scheduling": {"token_budget": 128},
        "fleet": {"routing": "least_loaded"},
    }
    with serve(args, num_replicas=2) as server:
        yield server


@pytest.fixture(scope="session")
def unfailed(served_fleet: Any) -> list[dict[str, Any]]:
    """What its clients get of `Streams` while nothing fails."""
    wait_for_engines(served_fleet, 2)
    return asyncio.run(Streams(served_fleet.url, served_fleet.model).run())


@pytest.fixture(scope="session")
def demo(ray_cluster: None) -> Iterator[LiveServer]:
    """The demo model behind the API, its engine in this process: for clients that only call."""
    from tests.serve.live_server import DEMO, live_server

    with live_server(DEMO, kv={"memory_gib": 0.05}) as server:
        yield server


@pytest.fixture(scope="session")
def own_serve(ray_cluster: None) -> Iterator[str]:
    """Ray Serve in this process's cluster, for applications that tests run: its address."""
    from ray import serve

    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
