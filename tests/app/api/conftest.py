from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from app.api.application import build_api
from app.api.batches.files import FileStore
from app.api.batches.jobs import Batches
from app.api.batches.limits import BatchLimits
from app.api.context import Context
from app.api.endpoints.batches import no_batches
from app.api.events import ApiEvents
from app.api.http.connections import RequestProtocol
from app.api.http.options import ApiOptions
from app.engine_client.client import ModelCard
from app.text.processor import TextProcessor
from tests.app.api.hand_engine import HandEngine
from tests.tiny_tokenizers import byte_level_folder

MODEL = "tiny"


@dataclass
class Server:
    """A running API over the hand-computable engine."""

    engine: HandEngine
    http: httpx.AsyncClient
    url: str
    port: int

    @property
    def openai(self) -> openai.AsyncOpenAI:
        base_url = f"{self.url}/v1"
        return openai.AsyncOpenAI(
            base_url=base_url, api_key="none", max_retries=0, http_client=self.http
        )


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextProcessor]:
    processor = TextProcessor(byte_level_folder(Path(tmp_path_factory.mktemp("model"))))
    yield processor
    processor.close()


StartServer = Callable[..., Awaitable[Server]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What depends on bytes and connections (a module's `PROTOCOLS`) is tried with each protocol;
    the application behind them is the same."""
    if "protocol" in metafunc.fixturenames:
        protocols = getattr(metafunc.module, "PROTOCOLS", ["own"])
        metafunc.parametrize("protocol", protocols, indirect=True)


@pytest.fixture
def protocol(request: pytest.FixtureRequest) -> Any:
    """uvicorn as Serve runs it behind HAProxy, and as a lone replica runs it."""
    return "httptools" if getattr(request, "param", "own") == "uvicorn" else RequestProtocol


@pytest.fixture
async def start_server(
    text: TextProcessor, protocol: Any, tmp_path: Path
) -> AsyncIterator[StartServer]:
    """Start servers on ephemeral loopback ports; they stop with the test."""
    running: list[tuple[uvicorn.Server, httpx.AsyncClient]] = []
    kept: list[Batches] = []

    async def start(
        options: ApiOptions | None = None,
        events: ApiEvents | None = None,
        processor: TextProcessor | None = None,
        batches: BatchLimits | None = None,
        **card: Any,
    ) -> Server:
        used = processor or text
        fields: dict[str, Any] = {
            "name": MODEL,
            "path": used.model_path,
            "max_model_len": 4096,
            "vocab_size": used.vocab_size,
            "eos_token_ids": used.eos_token_ids,
            "created_s": 1_700_000_000,
        }
        engine = HandEngine(ModelCard(**{**fields, **card}))
        context = Context(engine, used, options or ApiOptions(), events or ApiEvents())
        if batches is not None:
            kept.append(Batches(FileStore(tmp_path / "batches", batches)))
        app = build_api(context, batches=no_batches if batches is None else lambda: kept[-1])
        listener = socket.create_server(("127.0.0.1", 0))
        # Small, so that a slow reader is one after kilobytes instead of megabytes.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        port = listener.getsockname()[1]
        config = uvicorn.Config(app, http=protocol, ws="none", log_level="warning")
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[listener])
        url = f"http://127.0.0.1:{port}"
        # Without certificates, which nothing here needs and which take 30 ms to read.
        http = httpx.AsyncClient(base_url=url, timeout=30.0, verify=False)
        running.append((server, http))
        return Server(engine, http, url, port)

    yield start
    for batches in kept:
        await batches.close()
    for server, http in running:
        await http.aclose()
        await stop(server)


async def stop(server: uvicorn.Server) -> None:
    """As its own `shutdown`, without the tenth of a second that it waits before it looks."""
    for listening in server.servers:
        listening.close()
    for connection in list(server.server_state.connections):
        connection.shutdown()
    while server.server_state.connections or server.server_state.tasks:  # noqa: ASYNC110 (no event)
        await asyncio.sleep(0)
    await server.lifespan.shutdown()


@pytest.fixture
async def server(start_server: StartServer) -> Server:
    return await start_server()
