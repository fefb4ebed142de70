"""The common part of replicas that answer HTTP: text, telemetry, the API, handle calls."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import ray
from ray import serve
from ray.serve.exceptions import RayServeException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from actors.engine.config import EngineConfig
from actors.transport.notices import notify
from app.api.application import build_api
from app.api.context import Context, Running
from app.api.http.http_server import HttpServer
from app.api.http.options import at_address
from app.batch_service import BatchService
from app.console.routes import console_routes
from app.engine_client.link import EngineFailed
from app.handle_calls import HandleCalls, ReplicaEngine
from app.settings.model_folder import SettingsError, read_template, sampling_defaults
from app.settings.schema import ModelSettings, Settings
from app.telemetry.live import Telemetry
from app.telemetry.loop_lag import LoopLag
from app.telemetry.prometheus import CONTENT_TYPE, HttpErrors, render
from app.telemetry.records import RecordLog, replica_folder
from app.telemetry.spans import Spans, otlp_exporter
from app.text.lean_import import import_tokenizers_alone
from app.text.processor import TextProcessor

_log = logging.getLogger(__name__)


def load_text(folder: str, model: ModelSettings) -> TextProcessor:
    """The text processor, ready for grammars. Raises SettingsError for a chat template of the
    settings, or recommendations of the folder, that will not do."""
    import_tokenizers_alone()
    text = TextProcessor(
        folder,
        chat_template=read_template(model.chat_template),
        tool_parser=model.tool_parser,
        reasoning_parser=model.reasoning_parser,
    )
    if text.template_problem is not None and model.chat_template is not None:
        raise SettingsError(f"model.chat_template: {text.template_problem}")
    if text.template_problem is not None:
        notify(f"{folder}: {text.template_problem}; chats are refused, completions are answered")
    if model.sampling_defaults == "model":
        text.sampling_defaults, wrong = sampling_defaults(folder)
        for problem in wrong:
            _log.warning("not recommended to requests: %s", problem)
        if found := text.sampling_defaults:
            _log.info("%s: requests over HTTP sample with %s unless they say", folder, found)
    text.grammars.warm()  # while engines load, because later it would take cores from the steps
    return text


def _application() -> str | None:
    """Whose replicas share an address; None: this is no replica, as in tests."""
    try:
        name = serve.get_replica_context().app_name
    except RayServeException:
        return None
    return f"{ray.get_runtime_context().get_session_name()} {name}"


class HttpReplica(HandleCalls):
    """Base of the deployments. `engines`, `models` and `settings` (of the first model) are set by
    their `__init__`, which then calls `open`."""

    settings: Settings
    engines: Sequence[ReplicaEngine]  # to be closed, even if they did not start
    telemetry: Mapping[str, Telemetry]  # of every model
    api: ASGIApp
    http: HttpServer | None
    batches: BatchService
    loop_lag: LoopLag
    running: Running

    async def open(self, configs: Sequence[EngineConfig]) -> None:
        """Answer HTTP. configs: of every model, in the order of `models`."""
        directory = self.settings.telemetry.directory
        logs = None if directory is None else replica_folder(Path(directory))
        self.telemetry = {
            name: self._observe(config, name, logs)
            for name, config in zip(self.models, configs, strict=True)
        }
        self.loop_lag = LoopLag()
        self.loop_lag.start()
        self.batches = BatchService(self.settings)
        await self.batches.open()
        self.running = Running()
        self.http_errors = HttpErrors(self.running.errors)
        self.api = self._build_api()
        self.http = await self._open_http()

    def _observe(self, config: EngineConfig, name: str, logs: Path | None) -> Telemetry:
        log = None
        if logs is not None:
            folder = logs / name.replace("/", "-") if len(self.models) > 1 else logs
            log = RecordLog(folder, dataclasses.asdict(config))
        spans_to = self.settings.telemetry.spans_to
        spans = None if spans_to is None else Spans(name, otlp_exporter(spans_to))
        engine = self.models[name].engine
        telemetry = Telemetry(name, engine, log, spans)
        engine.iterations.observers.append(telemetry.on_iterations)
        return telemetry

    def _build_api(self) -> ASGIApp:
        options = self.settings.api
        if self.settings.listen is not None:
            options = at_address(options, self.settings.listen_address[0])
        contexts = {
            name: Context(
                engine, text, options, self.telemetry[name], self.running, adapters=adapters
            )
            for name, (engine, text, adapters) in self.models.items()
        }
        if len(contexts) > 1:
            for context in contexts.values():
                context.models = contexts
        consoles = [(name, one.engine, self.telemetry[name]) for name, one in self.models.items()]
        routes = [Route("/metrics", self._metrics), *console_routes(consoles, options)]
        return build_api(next(iter(contexts.values())), routes, self.batches)

    async def _open_http(self) -> HttpServer | None:
        if self.settings.listen is None:
            return None
        limit = self.settings.api.max_connections
        http = HttpServer(
            self.api,
            *self.settings.listen_address,
            max_connections=limit,
            errors=self.running.errors,
            owner=_application(),
        )
        try:
            await http.open()
        except OSError as error:
            raise EngineFailed(f"listen: {self.settings.listen}: {error.strerror}") from error
        return http

    async def _metrics(self, request: Request) -> Response:
        models = [telemetry.metrics_now() for telemetry in self.telemetry.values()]
        others = (self.loop_lag.registry, self.http_errors.registry)
        found = render(models, *others, replica=self._label())
        return Response(found, media_type=CONTENT_TYPE)

    def _label(self) -> str | None:
        """Its name in `/metrics`; None where it has an address of its own."""
        if self.settings.listen is not None:
            return None
        try:
            return serve.get_replica_context().replica_id.unique_id
        except RayServeException:  # no replica, as in tests
            return None

    async def close(self) -> None:
        """Waits for the requests of the replica's own server, which Serve does not count."""
        engines = getattr(self, "engines", ())
        if (batches := getattr(self, "batches", None)) is not None:
            await batches.close()  # at once: no client can fetch what they would still write
        http = getattr(self, "http", None)
        if http is not None:
            for engine in engines:
                engine.iterations.close()
            await http.close()
        for engine in engines:
            await engine.close()
        for telemetry in getattr(self, "telemetry", {}).values():
            telemetry.close()
        if (loop_lag := getattr(self, "loop_lag", None)) is not None:
            loop_lag.close()
