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
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import msgpack
import psutil
from ray import serve
from ray.experimental import internal_kv
from ray.serve.exceptions import RayServeException
from starlette.types import ASGIApp

from actors.transport.gc_utils import freeze_gc_heap
from actors.transport.node_directory import this_node
from actors.transport.notices import notify
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

logger = logging.getLogger(__name__)

_NAMESPACE: Final = "legato"
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
        if (name_here := _name_here()) is not None:
            await asyncio.to_thread(tell_succession, name_here)
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
        if (name_here := _name_here()) is not None:
            await asyncio.to_thread(leave_in_order, name_here)
        await self.close()


def _name_here() -> str | None:
    """Of the deployment; None: this is no replica, as in tests."""
    try:
        context = serve.get_replica_context()
    except RayServeException:
        return None
    return f"{context.app_name}/{context.deployment}"


def tell_succession(name: str) -> None:
    """Note in the cluster's store that this process serves, and say so if the one that is noted
    there has died: its deployment is whole again."""
    own = (this_node(), os.getpid())
    try:
        noted = internal_kv._internal_kv_get(_key(name), namespace=_NAMESPACE)
        internal_kv._internal_kv_put(_key(name), msgpack.packb(own), namespace=_NAMESPACE)
    except Exception as error:  # the store is down: no line is worth a replica
        logger.warning("noting that this replica serves: %s", error)
        return
    node, pid = own if noted is None else msgpack.unpackb(noted)
    if node == own[0] and not _lives(pid):
        notify(f"process {own[1]} serves in the place of process {pid}, which had died")


def leave_in_order(name: str) -> None:
    """Whatever serves next takes the place of none that has died."""
    with suppress(Exception):  # the store is down
        noted = internal_kv._internal_kv_get(_key(name), namespace=_NAMESPACE)
        if noted == msgpack.packb((this_node(), os.getpid())):
            internal_kv._internal_kv_del(_key(name), namespace=_NAMESPACE)


def _key(name: str) -> str:
    return f"serving/{name}"


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


LLMServer = serve.deployment(serve.ingress()(Server), name="LLMServer", **FOR_STREAMS)
WITHOUT_ROUTES = serve.deployment(Server, name="LLMServer", **FOR_STREAMS)  # for another's ingress
