"""What replicas that answer HTTP have in common: text, telemetry, the API, Python callers."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from actors.engine_config import EngineConfig
from actors.scheduling.request import Objective
from app.api.application import build_api
from app.api.http.options import at_address
from app.api.http.server import HttpServer
from app.console.routes import console_routes
from app.engine.client import EngineClient
from app.engine.link import EngineFailed
from app.engine.streams import IterationFeed
from app.handle_calls import HandleCalls
from app.settings import Settings
from app.settings_schema import ModelSettings
from app.telemetry.live import Telemetry
from app.telemetry.prometheus import CONTENT_TYPE
from app.telemetry.records import RecordLog
from app.telemetry.spans import Spans, otlp_exporter
from app.text.processor import TextProcessor


class ReplicaEngine(EngineClient, Protocol):
    """`LiveEngine` or `FleetClient`."""

    objective: Objective
    iterations: IterationFeed

    @property
    def num_blocks(self) -> int: ...
    async def close(self) -> None: ...


def load_text(folder: str, model: ModelSettings) -> TextProcessor:
    """What turns text into tokens and back, ready for grammars."""
    text = TextProcessor(
        folder, tool_parser=model.tool_parser, reasoning_parser=model.reasoning_parser
    )
    text.grammars.warm()  # while engines load: later it would take the steps' cores
    return text


class HttpReplica(HandleCalls):
    """Base of the deployments. `engine`, `text` and `settings` are set by their `__init__`, which
    then calls `open`."""

    settings: Settings
    engine: ReplicaEngine
    text: TextProcessor
    telemetry: Telemetry
    api: ASGIApp
    http: HttpServer | None

    async def open(self, config: EngineConfig, name: str) -> None:
        """Answer HTTP."""
        self.telemetry = self._observe(config, name)
        self.api = self._build_api()
        self.http = await self._open_http()

    def _observe(self, config: EngineConfig, name: str) -> Telemetry:
        log = None
        if self.settings.telemetry.directory is not None:
            folder = Path(self.settings.telemetry.directory) / f"replica-{os.getpid()}"
            log = RecordLog(folder, dataclasses.asdict(config))
        spans_to = self.settings.telemetry.spans_to
        spans = None if spans_to is None else Spans(name, otlp_exporter(spans_to))
        telemetry = Telemetry(name, self.engine, log, spans)
        self.engine.iterations.observers.append(telemetry.on_iterations)
        return telemetry

    def _build_api(self) -> ASGIApp:
        options = self.settings.api
        if self.settings.listen is not None:
            options = at_address(options, self.settings.listen_address[0])
        console = console_routes(self.engine, self.telemetry, options)
        routes = [Route("/metrics", self._metrics), *console]
        return build_api(
            self.engine, self.text, options, events=self.telemetry, extra_routes=routes
        )

    async def _open_http(self) -> HttpServer | None:
        if self.settings.listen is None:
            return None
        limit = self.settings.api.max_connections
        http = HttpServer(self.api, *self.settings.listen_address, max_connections=limit)
        try:
            await http.open()
        except OSError as error:
            raise EngineFailed(f"listen: {self.settings.listen}: {error.strerror}") from error
        return http

    async def _metrics(self, request: Request) -> Response:
        return Response(self.telemetry.render(), media_type=CONTENT_TYPE)

    async def close(self) -> None:
        """Serve waits for the requests it knows; those of our own server it does not know."""
        http = getattr(self, "http", None)
        if http is not None:
            self.engine.iterations.close()
            await http.close()
        engine = getattr(self, "engine", None)
        if engine is not None:
            await engine.close()
        telemetry = getattr(self, "telemetry", None)
        if telemetry is not None:
            telemetry.close()
