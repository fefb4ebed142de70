"""The API over a real engine, served to synchronous clients from a thread of this process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from app.api.application import build_api
from app.api.context import Context
from app.api.events import ApiEvents
from app.api.http.options import at_address
from app.batch_service import BatchService
from app.engine_client.adapters import AdapterEngine
from app.engine_client.live import LiveEngine
from app.settings.load import parse, resolve
from app.text.processor import TextProcessor

DEMO = Path(__file__).resolve().parents[2] / "configs/models/demo"


@dataclass(frozen=True, slots=True)
class LiveServer:
    url: str
    model: str
    engine: LiveEngine
    text: TextProcessor
    loop: asyncio.AbstractEventLoop  # the engine's own


@contextmanager
def live_server(
    folder: Path, events: ApiEvents | None = None, **sections: dict[str, Any]
) -> Iterator[LiveServer]:
    """Serve this model folder until the block ends; Ray must be running."""
    started: Future[LiveServer] = Future()
    ended = asyncio.Event()

    async def main() -> None:
        settings = parse({"model": {"path": str(folder)}, **sections})
        adapters: AdapterEngine | None = None
        if settings.adapters is not None:
            names = tuple(settings.adapters.paths)
            adapters = AdapterEngine(resolve(settings), folder.name, names)
        engine = adapters or LiveEngine(resolve(settings), folder.name)
        await engine.start()
        text = TextProcessor(folder)
        # Adapters are loaded by any client on this machine.
        options = settings.api if adapters is None else at_address(settings.api, "127.0.0.1")
        context = Context(engine, text, options, events or ApiEvents(), adapters=adapters)
        batches = BatchService(settings)
        await batches.open()
        app = build_api(context, batches=batches)
        listener = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(app, log_level="warning")
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[listener])
        loop = asyncio.get_running_loop()
        started.set_result(LiveServer(url, folder.name, engine, text, loop))
        await ended.wait()
        await batches.close()
        await server.shutdown()
        await engine.close()
        text.close()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=run, name="live-server")
    thread.start()
    server = None
    try:
        server = started.result()
        yield server
    finally:
        if server is not None:
            server.loop.call_soon_threadsafe(ended.set)
        thread.join()
