"""Routes of the console: one page, its live feed of iterations, and the live policy switch.

They stand behind the API's guard (keys, origins, limits) like every other route.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from pathlib import Path
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from actors.scheduling.policies import POLICIES
from app.engine.client import EngineClient, EngineUnavailable, RequestRefused

_PAGE = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
# Nothing is fetched from elsewhere: the page works offline and cannot leak what is typed.
_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
}
_FEED_PERIOD_S = 0.1  # iterations come every few milliseconds; eyes need ten frames a second


class Observer(Protocol):
    """What the replica knows of its objectives; telemetry implements it."""

    def objectives(self) -> Mapping[str, Any]:
        """`gaps_kept`, and `gaps_missed` by cause."""

    def watch_gaps(self) -> AbstractContextManager[deque[float]]:
        """Times between tokens in seconds as the replica sees them, to be taken out."""


def console_routes(engine: EngineClient, observer: Observer) -> Sequence[BaseRoute]:
    """`/` (the page), `/console/...` (its files, feed, status, settings)."""
    files = {f"/console/{file.name}": file for file in sorted(_PAGE.iterdir()) if file.is_file()}

    async def page(request: Request) -> Response:
        return _file(_PAGE / "index.html")

    async def asset(request: Request) -> Response:
        return _file(files[request.url.path])

    async def status(request: Request) -> Response:
        try:
            snapshot = dict(await engine.status())
        except EngineUnavailable as error:
            return JSONResponse({"ready": False, "reason": str(error)}, 503)
        card = engine.card
        snapshot |= {"ready": engine.is_ready(), "model": card.name, "policies": sorted(POLICIES)}
        snapshot |= {"max_model_len": card.max_model_len, "objectives": observer.objectives()}
        return JSONResponse(snapshot)

    async def feed(request: Request) -> Response:
        return StreamingResponse(
            _events(engine, observer), media_type="text/event-stream", headers=_HEADERS
        )

    async def reconfigure(request: Request) -> Response:
        try:
            changes = await request.json()
        except ValueError:
            changes = None
        if not isinstance(changes, dict) or not changes:
            return _error(400, "The body must be a JSON object of settings.", None)
        try:
            await engine.reconfigure(changes)
        except RequestRefused as error:
            return _error(400, str(error), error.param)
        return JSONResponse({"changed": sorted(changes)})

    return [
        Route("/", page),
        *[Route(path, asset) for path in files],
        Route("/console/status", status),
        Route("/console/feed", feed),
        Route("/console/settings", reconfigure, methods=["POST"]),
    ]


def _file(path: Path) -> Response:
    return FileResponse(path, media_type=_TYPES[path.suffix], headers=_HEADERS)


def _error(status: int, message: str, param: str | None) -> Response:
    body: dict[str, Any] = {"message": message, "type": "invalid_request_error", "param": param}
    return JSONResponse({"error": {**body, "code": None}}, status)


async def _events(engine: EngineClient, observer: Observer) -> AsyncGenerator[bytes, None]:
    with observer.watch_gaps() as gaps_s:
        async with aclosing(engine.subscribe_iterations()) as batches:
            async for batch in batches:
                content = {"iterations": batch, "gaps_s": list(gaps_s)}
                gaps_s.clear()
                yield b"data: " + json.dumps(content).encode() + b"\n\n"
                await asyncio.sleep(_FEED_PERIOD_S)
