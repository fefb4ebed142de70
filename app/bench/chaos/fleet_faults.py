"""Faults of a fleet: engines die, are replaced, leave and join."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from app.bench.chaos.faults import Fault, Lift, Skipped, frozen, killed, nothing
from app.bench.chaos.own_server import OwnServer

_SCALED_WITHIN_S = 180.0


def _engine_killed(server: OwnServer, chance: random.Random) -> Lift:
    """Kill an engine's scheduler and its replica, as when a node dies."""
    engines = [engine for engine in server.engines() if engine.get("state") == "serving"]
    if len(engines) < 2:
        raise Skipped("no other engine serves")
    victim = chance.choice(engines)
    server.doomed = frozenset({victim["id"]})
    for pid in (victim["pid"], victim["replica_pid"]):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return nothing


def _updated(server: OwnServer, chance: random.Random) -> Lift:
    """Change a setting that restarts every replica."""
    server.doomed = frozenset(engine["id"] for engine in server.engines())

    def change(application: dict[str, Any]) -> None:
        api = application["args"].setdefault("api", {})
        api["send_timeout_s"] = api.get("send_timeout_s", 10.0) + 1.0

    server.redeploy(change)
    return nothing


def _scaled(server: OwnServer, chance: random.Random) -> Lift:
    """Scale down by one engine, then up again."""
    resizable = [name for name, count in server.engines_of.items() if count > 1]
    if not resizable:
        raise Skipped("each deployment of engines has one alone")
    name = chance.choice(resizable)
    before = server.engines_of[name]
    _resize(server, name, before - 1)
    deadline_s = time.monotonic() + _SCALED_WITHIN_S
    while not server.is_whole() and time.monotonic() < deadline_s:
        time.sleep(0.2)
    return lambda: _resize(server, name, before)


def _resize(server: OwnServer, name: str, num_engines: int) -> None:
    def change(application: dict[str, Any]) -> None:
        for deployment in application["deployments"]:
            if deployment["name"] == name:
                deployment["num_replicas"] = num_engines

    server.engines_of[name] = num_engines
    server.redeploy(change)


FLEET_FAULTS: Mapping[str, Fault] = {
    "engine killed": Fault(_engine_killed),
    "fleet updated": Fault(_updated),
    "fleet scaled": Fault(_scaled),
    "stage killed": Fault(killed("stage")),
    "scheduler killed": Fault(killed("scheduler")),
    "scheduler frozen": Fault(frozen("scheduler")),
    "controller killed": Fault(killed("controller")),
}
