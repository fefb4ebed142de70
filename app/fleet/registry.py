"""The addresses of a fleet's engines: one entry each in the key-value store of the Ray cluster.

The store is part of the GCS. It survives Serve's controller and every replica, and needs no extra
process. While it is down no new engine is found; open connections continue.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from dataclasses import asdict, dataclass, fields, replace
from typing import NamedTuple

import msgpack
import ray
from ray.experimental import internal_kv

from actors.engine.peers import FrontAddress
from actors.transport.addresses import new_local_address, new_secret
from actors.transport.node_directory import this_node

logger = logging.getLogger("legato.fleet")

_NAMESPACE = "legato"
_WAITING_FOR_S = 15.0  # a report counts this long; fronts repeat it earlier
_FORGOTTEN_AFTER_S = 600.0  # a report
_CLOCKS_WITHIN_S = 300.0  # of nodes; a report seen for the first time may be left from long ago


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """The addresses of one engine. tcp: "host:port" for other nodes, if it listens for them. pid:
    of the replica that owns it, on its node. serves: model and version of Legato; a front uses only
    engines that serve what it serves. num_repeats: how often the engine has confirmed it;
    None of an older Legato, which repeats nothing.
    """

    engine_id: str
    node: str
    local: str
    tcp: str | None
    secret: bytes
    pid: int
    serves: str = ""
    num_repeats: int | None = None


class AdapterEntry(NamedTuple):
    """An adapter that every engine of a fleet has in this slot. key: as in
    `EngineSnapshot.adapters`."""

    slot: int
    name: str
    folder: str
    key: str


@dataclass(frozen=True, slots=True)
class AdapterList:
    """version: counts changes."""

    version: int = 0
    entries: tuple[AdapterEntry, ...] = ()


class Registry:
    """The engines of one model. Every method queries the cluster, off the event loop."""

    def __init__(self, name: str) -> None:
        self._prefix = f"{name}/engines/"
        self._waiting = f"{name}/waiting/"
        self._adapters = f"{name}/adapters/"
        self._reports: dict[bytes, tuple[bytes, float]] = {}  # by key, and since when each is so

    async def put(self, entry: EngineEntry) -> None:
        packed = msgpack.packb(asdict(entry))
        await asyncio.to_thread(
            internal_kv._internal_kv_put, self._key(entry.engine_id), packed, namespace=_NAMESPACE
        )

    async def drop(self, engine_id: str) -> None:
        await asyncio.to_thread(
            internal_kv._internal_kv_del, self._key(engine_id), namespace=_NAMESPACE
        )

    async def ids(self) -> list[str]:
        keys = await asyncio.to_thread(
            internal_kv._internal_kv_list, self._prefix, namespace=_NAMESPACE
        )
        return [key.decode().removeprefix(self._prefix) for key in keys]

    async def report_waiting(self, front_id: str, count: int) -> None:
        """Report how many requests wait at this front for an engine to start."""
        key = f"{self._waiting}{front_id}"
        if count:
            packed = msgpack.packb((time.time(), count))  # the time: each repeat differs
            await asyncio.to_thread(internal_kv._internal_kv_put, key, packed, namespace=_NAMESPACE)
        else:
            await asyncio.to_thread(internal_kv._internal_kv_del, key, namespace=_NAMESPACE)

    def num_waiting(self, now_s: float) -> int:
        """Waiting requests of all fronts; ignores reports that are not repeated, whose fronts have
        died, and deletes those that have not been for long. now_s: by `time.monotonic`; the clocks
        of the fronts' nodes may differ from this one's, by which only the first look judges."""
        total, before, self._reports = 0, self._reports, {}
        for key in internal_kv._internal_kv_list(self._waiting, namespace=_NAMESPACE):
            packed = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
            if packed is None:  # its front has just deleted it
                continue
            told_s, count = msgpack.unpackb(packed)
            is_left = abs(time.time() - told_s) > _CLOCKS_WITHIN_S
            first_s = now_s - _WAITING_FOR_S if is_left else now_s
            known, since_s = before.get(key, (packed, first_s))
            if known != packed:
                since_s = now_s
            self._reports[key] = packed, since_s
            total += count if now_s - since_s < _WAITING_FOR_S else 0
            if now_s - since_s > _FORGOTTEN_AFTER_S:
                internal_kv._internal_kv_del(key.decode(), namespace=_NAMESPACE)
        return total

    async def adapters(self, of: str) -> AdapterList:
        """The newest list of the adapters that were loaded live, of fronts with the same settings
        (`of`); version 0 and empty before the first change."""
        return await asyncio.to_thread(self._newest_adapters, f"{self._adapters}{of}/")

    def _newest_adapters(self, prefix: str) -> AdapterList:
        keys = internal_kv._internal_kv_list(prefix, namespace=_NAMESPACE)
        for key in sorted(keys, reverse=True):
            packed = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
            if packed is not None:  # else a newer one has just replaced it
                rows = msgpack.unpackb(packed)
                version = int(key.decode().removeprefix(prefix))
                return AdapterList(version, tuple([AdapterEntry(*row) for row in rows]))
        return AdapterList()

    async def put_adapters(self, of: str, changed: AdapterList) -> bool:
        """Replace the list of the version before; False, and no change, if another front has."""
        return await asyncio.to_thread(self._put_adapters, f"{self._adapters}{of}/", changed)

    def _put_adapters(self, prefix: str, changed: AdapterList) -> bool:
        key = f"{prefix}{changed.version:09d}"
        packed = msgpack.packb(changed.entries)
        if internal_kv._internal_kv_put(key, packed, overwrite=False, namespace=_NAMESPACE):
            return False
        others = [k.decode() for k in internal_kv._internal_kv_list(prefix, namespace=_NAMESPACE)]
        is_newest = max(others) == key  # else this version has been and is gone
        for other in others:
            if other < key or (not is_newest and other == key):
                internal_kv._internal_kv_del(other, namespace=_NAMESPACE)
        return is_newest

    async def get(self, engine_id: str) -> EngineEntry | None:
        packed = await asyncio.to_thread(
            internal_kv._internal_kv_get, self._key(engine_id), namespace=_NAMESPACE
        )
        if packed is None:
            return None
        told = msgpack.unpackb(packed)  # another version of Legato may tell more, or less
        known = {field.name for field in fields(EngineEntry)} & told.keys()
        blank = EngineEntry(engine_id, "", "", None, b"", 0)
        return replace(blank, **{name: told[name] for name in known})

    def _key(self, engine_id: str) -> str:
        return f"{self._prefix}{engine_id}"


def registry_of(application: str, deployment: str) -> Registry:
    """deployment: of the engines."""
    return Registry(f"{application}/{deployment}")


class Member:
    """The entry of one engine: implements `app.engine_client.link.Membership`.

    name: of the replica; each start of its scheduler counts as a new engine. tcp: whether to
    listen for other nodes; None: if there are any when the engine starts. serves: as in
    `EngineEntry`.
    """

    def __init__(
        self, registry: Registry, name: str, tcp: bool | None = None, serves: str = ""
    ) -> None:
        self._registry = registry
        self._name = name
        self._tcp = tcp
        self._serves = serves
        self._entry: EngineEntry | None = None
        self._before: list[str] | None = None  # engines that were there when it first joined

    def new_front_address(self) -> FrontAddress:
        tcp = self._tcp
        if tcp is None:
            tcp = sum(bool(node["Alive"]) for node in ray.nodes()) > 1
        return FrontAddress(
            engine_id=f"{self._name}.{secrets.token_hex(3)}",
            local=new_local_address(),
            host=ray.util.get_node_ip_address() if tcp else None,
            secret=new_secret(),
        )

    async def join(self, fronts: FrontAddress, tcp_address: str | None) -> None:
        entry = EngineEntry(
            fronts.engine_id, this_node(), fronts.local, tcp_address, fronts.secret, os.getpid(),
            self._serves, num_repeats=0,
        )  # fmt: skip
        former, self._entry = self._entry, entry  # first, for `confirm`, should the store be away
        if self._before is None:
            self._before = await self._registry.ids()
        if former is not None:
            await self._registry.drop(former.engine_id)
        await self._registry.put(entry)

    async def part(self) -> None:
        entry, self._entry = self._entry, None
        if entry is not None:
            await self._registry.drop(entry.engine_id)

    async def is_replaced(self) -> bool:
        """Whether engines that serve another model or version have joined after it."""
        if self._entry is None or self._before is None:
            return False
        after = set(await self._registry.ids()) - set(self._before)
        found = [await self._registry.get(engine_id) for engine_id in after]
        return any(entry is not None and entry.serves != self._serves for entry in found)

    async def confirm(self) -> None:
        """Repeat the entry: fronts drop one that is not repeated."""
        if self._entry is not None:
            self._entry = replace(self._entry, num_repeats=(self._entry.num_repeats or 0) + 1)
            await self._registry.put(self._entry)
