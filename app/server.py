"""The one Serve deployment: HTTP ingress and owner of the engine are the same replica.

Its child actors (scheduler, stages) live in the replica's placement group, so autoscaling adds
and removes whole engines. Python callers use the same replica through a Serve handle:
`handle.generate.options(stream=True).remote(prompt, max_tokens=32)`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from ray import serve
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from actors.engine_config import EngineConfig
from actors.gc_utils import freeze_gc_heap
from actors.scheduling.request import Objective
from app.api.application import build_api
from app.api.http.options import at_address
from app.api.http.server import HttpServer
from app.console.routes import console_routes
from app.engine.client import EngineUnavailable, GenerationRequest, ModelCard
from app.engine.link import EngineFailed
from app.engine.live import LiveEngine
from app.handle_params import check_ids, sampling_from
from app.ray_environment import DRAIN_S
from app.settings import Settings, parse, resolve
from app.settings_schema import ModelSettings
from app.telemetry.live import Telemetry
from app.telemetry.prometheus import CONTENT_TYPE
from app.telemetry.records import RecordLog
from app.telemetry.spans import Spans, otlp_exporter
from app.text.processor import TextProcessor

logger = logging.getLogger("legato.server")


@serve.deployment(
    name="LLMServer",
    # Serve's defaults (5 ongoing requests, drain of 20 s, checks every 10 s) suit functions, not
    # token streams: admission is the scheduler's business, and long streams must drain.
    max_ongoing_requests=100_000,
    graceful_shutdown_wait_loop_s=0.5,
    graceful_shutdown_timeout_s=DRAIN_S,
    health_check_period_s=5.0,
    health_check_timeout_s=30.0,
)
@serve.ingress()
class LLMServer:
    """args: the YAML's `args` (schema: `app.settings.Settings`)."""

    async def __init__(self, args: Mapping[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits
        self.settings: Settings = parse(args)
        config = dataclasses.replace(resolve(self.settings), grammars=True)
        name = self.settings.model.name or Path(config.stage.model_path).name
        text_task = asyncio.create_task(
            asyncio.to_thread(_load_text, config.stage.model_path, self.settings.model)
        )
        self.engine = LiveEngine(config, name)
        await self.engine.start()
        self.text = await text_task
        self.telemetry = self._observe(config, name)
        self.api = self._build_api()
        self.http = await self._open_http()
        freeze_gc_heap()

    def _observe(self, config: EngineConfig, name: str) -> Telemetry:
        log = None
        if self.settings.telemetry.directory is not None:
            folder = Path(self.settings.telemetry.directory) / f"replica-{os.getpid()}"
            log = RecordLog(folder, dataclasses.asdict(config))
        spans_to = self.settings.telemetry.spans_to
        spans = None if spans_to is None else Spans(name, otlp_exporter(spans_to))
        telemetry = Telemetry(name, lambda: self.engine.objective, log, spans)
        telemetry.num_blocks = self.engine.num_blocks
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

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self.api

    async def _metrics(self, request: Request) -> Response:
        return Response(self.telemetry.render(), media_type=CONTENT_TYPE)

    # ---- Serve's hooks -----------------------------------------------------------------------

    async def check_health(self) -> None:
        """Fails when the engine is beyond repair, so that Serve replaces the replica."""
        if self.engine.failure is not None:
            raise EngineFailed(self.engine.failure)

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """`user_config` changes policy, budget, objectives live; keys of `scheduling`, `slo`."""
        if user_config:
            await self.engine.reconfigure(user_config)

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {"open_requests": float(self.engine.num_open)}

    async def __del__(self) -> None:
        http = getattr(self, "http", None)
        if http is not None:  # Serve waits for the requests it knows; these it does not
            self.engine.iterations.close()
            await http.close()
        engine = getattr(self, "engine", None)
        if engine is not None:
            await engine.close()
        telemetry = getattr(self, "telemetry", None)
        if telemetry is not None:
            telemetry.close()

    # ---- Python callers ------------------------------------------------------------------------

    async def generate(
        self, prompt: str | list[int], **params: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Stream token events: {"index", "tokens", "text", "finish_reason"}.

        params: `SamplingParams` fields plus `slo` ({"tbt_ms", "ttft_ms"}), `priority`, `tenant`,
        `ignore_eos`, and `output` (token ids already delivered: generation goes on behind them).
        Raises ValueError naming a bad parameter.
        """
        card: ModelCard = self.engine.card
        tokens = await self.text.encode(prompt) if isinstance(prompt, str) else list(prompt)
        check_ids(tokens, card, "prompt")
        call = sampling_from(params, len(tokens), card)
        request = GenerationRequest(
            request_id=f"handle-{uuid.uuid4().hex}",
            prompt=tuple(tokens),
            sampling=call.sampling,
            tenant=call.tenant,
            priority=call.priority,
            objective=Objective(call.tbt_s, call.ttft_s),
            output=call.output,
        )
        detokenizer = self.text.detokenizer()
        async with aclosing(self.engine.generate(request)) as chunks:
            async for chunk in chunks:
                text = detokenizer.push(chunk.tokens)
                if chunk.finish_reason is not None:
                    text += detokenizer.flush()
                yield {
                    "index": chunk.first,
                    "tokens": chunk.tokens,
                    "text": text,
                    "finish_reason": chunk.finish_reason,
                }

    async def status(self) -> Mapping[str, Any]:
        """A snapshot of the engine; raises EngineUnavailable while it is being rebuilt."""
        if not self.engine.is_ready():
            raise EngineUnavailable("the engine is being rebuilt")
        return await self.engine.status()


def _load_text(folder: str, model: ModelSettings) -> TextProcessor:
    text = TextProcessor(
        folder, tool_parser=model.tool_parser, reasoning_parser=model.reasoning_parser
    )
    text.grammars.warm()  # while the engine loads: later it would take the steps' cores
    return text
