"""Routes of the console: one page, its live feed of iterations, and the live policy switch.

They stand behind the API's guard (keys, origins, limits) like every other route. Where keys are
set, the page and its files need none (`api.public_paths`), and the page asks its visitor for one.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from pathlib import Path
from typing import Any, Protocol

from pydantic import RootModel
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from actors.scheduling.policies import POLICIES
from app.api.http.audit import note_change
from app.api.http.call import Call
from app.api.http.errors import ApiError, invalid
from app.api.http.guard import Endpoint, PageFile, path_below
from app.api.http.options import ApiOptions
from app.engine_client.client import EngineClient, EngineUnavailable, RequestRefused

_log = logging.getLogger("legato.console")
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
_MAX_WATCHERS = 64
_FEED_PERIOD_S = 0.1  # iterations come every few milliseconds; eyes need ten frames a second


class Observer(Protocol):
    """The replica's record of its objectives; telemetry implements it."""

    def objectives(self) -> Mapping[str, Any]:
        """`gaps_kept`, and `gaps_missed` by cause."""

    def num_streamed(self) -> int:
        """Tokens streamed since the start."""

    def watch_gaps(self) -> AbstractContextManager[deque[float]]:
        """Times between tokens in seconds as the replica sees them, to be taken out."""


class _Changes(RootModel[dict[str, Any]]):
    """Settings by name."""


def console_routes(
    models: Sequence[tuple[str, EngineClient, Observer]], options: ApiOptions
) -> Sequence[BaseRoute]:
    """`/` (the page), `/console/...` (its files, feed, status, settings).

    models: by name. `?model=NAME` says which of several is meant, else it is the first.
    """
    served = {name: (engine, observer) for name, engine, observer in models}
    files = {f"/console/{file.name}": file for file in sorted(_PAGE.iterdir()) if file.is_file()}

    async def page(request: Request) -> Response:
        return _file(_PAGE / "index.html")

    async def asset(request: Request) -> Response:
        return _file(files[path_below(request.scope)])

    async def status(request: Request) -> Response:
        name = request.query_params.get("model", next(iter(served)))
        engine, observer = _meant(served, name)
        try:
            snapshot = dict(await engine.status())
        except EngineUnavailable as error:
            which = {"model": name, "models": list(served)}
            return JSONResponse({"ready": False, "reason": str(error), **which}, 503)
        card = engine.card
        snapshot |= {"ready": engine.is_ready(), "model": card.name, "policies": sorted(POLICIES)}
        snapshot |= {"max_model_len": card.max_model_len, "objectives": observer.objectives()}
        snapshot["models"] = list(served)
        return JSONResponse(snapshot)

    watchers = asyncio.Semaphore(_MAX_WATCHERS)

    async def feed(request: Request) -> Response:
        if request.method == "HEAD":  # or it would watch without an end, and be sent nothing
            return Response(media_type="text/event-stream", headers=_HEADERS)
        if watchers.locked():
            raise ApiError(
                429, "Too many consoles are watching.", code="overloaded", retry_after_s=10.0
            )
        return StreamingResponse(
            _events(*_meant(served, request.query_params.get("model")), watchers),
            media_type="text/event-stream",
            headers=_HEADERS,
        )

    async def reconfigure(call: Call) -> None:
        changes: dict[str, Any] = {}
        try:
            call.check_admin()
            engine, _ = _meant(served, QueryParams(call.scope["query_string"]).get("model"))
            changes = (await call.read_json(_Changes)).root
            if not changes:
                raise invalid("The body must be a JSON object of settings.")
            await engine.reconfigure(changes)
        except (ApiError, RequestRefused) as error:
            note_change(call.scope, changes, error)
            raise
        note_change(call.scope, changes, None)
        await call.reply_json({"changed": sorted(changes)})

    return [
        Route("/", page),
        *[PageFile(path, asset) for path in files],
        Route("/console/status", status),
        Route("/console/feed", feed),
        Route("/console/settings", Endpoint(reconfigure, options, _log), methods=["POST"]),
    ]


_Served = Mapping[str, tuple[EngineClient, Observer]]


def _meant(served: _Served, name: str | None) -> tuple[EngineClient, Observer]:
    if name is None:
        return next(iter(served.values()))
    if name not in served:
        known = f"but of {', '.join(served)}, each with its adapters"
        message = f"There are no figures of a model '{name[:128]}', {known}."
        raise ApiError(404, message, "model", "model_not_found")
    return served[name]


def _file(path: Path) -> Response:
    return FileResponse(path, media_type=_TYPES[path.suffix], headers=_HEADERS)


async def _events(
    engine: EngineClient, observer: Observer, watchers: asyncio.Semaphore
) -> AsyncGenerator[bytes, None]:
    async with watchers:
        with observer.watch_gaps() as gaps_s:
            async with aclosing(engine.subscribe_iterations()) as batches:
                async for batch in batches:
                    content = {"iterations": batch, "gaps_s": list(gaps_s)}
                    content["num_tokens"] = observer.num_streamed()
                    gaps_s.clear()
                    yield b"data: " + json.dumps(content).encode() + b"\n\n"
                    await asyncio.sleep(_FEED_PERIOD_S)
