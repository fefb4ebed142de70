"""The deployment without a fleet: one replica is both HTTP ingress and owner of the engine.

Its child actors (scheduler, stages) live in the replica's placement group, so autoscaling adds
and removes whole engines. A lone replica answers HTTP itself, because a load balancer copies each
token and adds idle processes; several replicas keep Serve's HAProxy. Python callers use the same
replica through a Serve handle:
`handle.generate.options(stream=True).remote(prompt, max_tokens=32)`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any

from ray import serve
from starlette.types import ASGIApp

from actors.transport.gc_utils import freeze_gc_heap
from actors.transport.time_slices import shorten_time_slices
from app.engine_client.adapters import AdapterEngine
from app.engine_client.link import EngineFailed
from app.engine_client.live import LiveEngine
from app.handle_calls import ServedModel
from app.ray_environment import DRAIN_S
from app.replica import HttpReplica, load_text
from app.settings.load import parse, resolve
from app.settings.models import served_name
from app.user_config import UserConfig

# Serve's defaults (5 ongoing requests, drain of 20 s, checks every 10 s) suit functions, not
# token streams: the scheduler does admission, and long streams need time to drain.
FOR_STREAMS: Mapping[str, Any] = {
    "max_ongoing_requests": 100_000,
    "graceful_shutdown_wait_loop_s": 0.5,
    "graceful_shutdown_timeout_s": DRAIN_S,
    "health_check_period_s": 5.0,
    "health_check_timeout_s": 30.0,
}


class Server(HttpReplica):
    """args: the YAML's `args` (schema: `app.settings.schema.Settings`)."""

    engine: LiveEngine

    async def __init__(self, args: Mapping[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits
        self.settings = parse(args)
        config = dataclasses.replace(resolve(self.settings), grammars=True)
        name = served_name(self.settings)
        text_task = asyncio.create_task(
            asyncio.to_thread(load_text, config.stage.model_path, self.settings.model)
        )
        adapters = None
        if self.settings.adapters is None:
            self.engine = LiveEngine(config, name)
        else:
            self.engine = adapters = AdapterEngine(config, name, self.settings.adapter_names)
        self.engines = [self.engine]
        self.user_config = UserConfig(self.engine, config.scheduler)
        # A template that will not do ends the start before the model has loaded.
        _, text = await asyncio.gather(self.engine.start(), text_task)
        self.models = {name: ServedModel(self.engine, text, adapters)}
        await self.open([config])
        freeze_gc_heap()
        shorten_time_slices()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self.api

    # ---- Serve's hooks -----------------------------------------------------------------------

    async def check_health(self) -> None:
        """Fails when the engine is beyond repair, so that Serve replaces the replica."""
        if self.engine.failure is not None:
            raise EngineFailed(self.engine.failure)

    async def reconfigure(self, user_config: Mapping[str, Any] | None, rank: Any = None) -> None:
        """`user_config` changes policy, budget, objectives live; keys of `scheduling`, `slo`. For
        the sake of `rank`, Serve also calls it where there is none, and where there no longer is.
        """
        await self.user_config.apply(user_config)

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {"open_requests": float(self.engine.num_open)}

    async def __del__(self) -> None:
        await self.close()


LLMServer = serve.deployment(serve.ingress()(Server), name="LLMServer", **FOR_STREAMS)
WITHOUT_ROUTES = serve.deployment(Server, name="LLMServer", **FOR_STREAMS)  # for another's ingress
