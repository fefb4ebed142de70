"""LoRA adapters of a fleet: loaded into the same slots of every engine, named by every front.

The list is in the cluster's key-value store. Each front reads it once a second, names its adapters
and has them loaded by engines that lack one, such as those that have just joined. The names last as
long as the cluster and the settings: other settings begin with their own adapters again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b

from app.engine_client.adapters import LOAD_WITHIN_S, AdaptedEngine
from app.engine_client.channel import QuestionFailed
from app.engine_client.client import EngineClient, EngineUnavailable, RequestRefused
from app.fleet.client import FleetClient
from app.fleet.connection import Connection
from app.fleet.registry import AdapterEntry, AdapterList, Registry
from app.fleet.stream_placement import RETRY_AFTER_S

logger = logging.getLogger("legato.fleet")

_PERIOD_S = 1.0
_AGAIN_AFTER_S = 30.0  # an engine that could not load one is asked again


class FleetAdapters:
    """Implements `client.AdapterControl` for one model. paths: of the settings, by name, in order
    of slots. models: all at this address, by name, and the settings of their adapters."""

    def __init__(
        self,
        fleet: FleetClient,
        registry: Registry,
        max_adapters: int,
        paths: Mapping[str, str],
        models: Mapping[str, object],
    ) -> None:
        self._fleet = fleet
        self._registry = registry
        self._max_adapters = max_adapters
        self._models = models
        self.beside: Sequence[FleetAdapters] = ()  # of the other models: no two have the same name
        # Those of all models, so that no adapter is kept whose name another model's settings take.
        settings = repr((max_adapters, list(paths.items()), sorted(models.items()))).encode()
        self._of = blake2b(settings, digest_size=8).hexdigest()
        self._first = tuple(
            AdapterEntry(slot, name, folder, folder)
            for slot, (name, folder) in enumerate(paths.items())
        )
        self._version = -1
        self._entries: dict[str, AdapterEntry] = {}
        self._served: dict[str, AdaptedEngine] = {}
        self._asked: dict[tuple[str, AdapterEntry], asyncio.Task[None]] = {}  # by engine
        self._watcher: asyncio.Task[None] | None = None
        self._use(AdapterList(0, self._first))

    @property
    def adapters(self) -> dict[str, EngineClient]:
        return dict(self._served)

    def start(self) -> None:
        self._watcher = asyncio.create_task(self._watch())

    def close(self) -> None:
        for task in (self._watcher, *self._asked.values()):
            if task is not None:
                task.cancel()

    async def load_adapter(self, name: str, path: str) -> None:
        """On all engines; one that does not answer, or that joins later, loads it then."""
        slot = await self._place_for(name)
        entry = AdapterEntry(slot, name, path, f"{secrets.token_hex(8)} {path}")
        connections = self._fleet.connections
        if not connections:
            raise EngineUnavailable("there is no engine", retry_after_s=RETRY_AFTER_S)
        found = await asyncio.gather(
            *[_load(connection, entry) for connection in connections], return_exceptions=True
        )
        errors = [error for error in found if isinstance(error, BaseException)]
        refused = [error for error in errors if not isinstance(error, EngineUnavailable)]
        if refused or len(errors) == len(found):
            raise (refused or errors)[0]
        is_listed = False
        while not is_listed:
            await self._place_for(name)  # raises if another load took the name
            if self._is_taken(slot):
                raise RequestRefused("another load took the slot: try again", param="lora_name")
            is_listed = await self._change((*self._entries.values(), entry))
        try:
            await self._check_name(name, self.beside)
        except RequestRefused:  # loaded for another model at the same time
            await self.unload_adapter(name)
            raise

    async def unload_adapter(self, name: str) -> int:
        """The number of running requests is that of this front."""
        held = self._served.get(name)
        await self._refresh()
        while name in self._entries:
            if await self._change(tuple(e for e in self._entries.values() if e.name != name)):
                return held.num_open if held is not None else 0
        raise RequestRefused(f"no adapter {name!r} is loaded", param="lora_name")

    async def _place_for(self, name: str) -> int:
        """The slot of a new adapter of this name; raises RequestRefused."""
        await self._check_name(name, (self, *self.beside))
        free = [slot for slot in range(self._max_adapters) if not self._is_taken(slot)]
        if not free:
            raise RequestRefused(
                f"all {self._max_adapters} adapter slots are taken (setting "
                "adapters.max_adapters): unload one",
                param="lora_name",
            )
        # Requests may still run on an adapter that was unloaded: an empty slot is better.
        held = {slot for one in self._fleet.snapshots for slot, _ in one.adapters}
        return min(free, key=lambda slot: (slot in held, slot))

    async def _check_name(self, name: str, controls: Sequence[FleetAdapters]) -> None:
        """Raises RequestRefused for the name of a model or of one of these adapters."""
        await asyncio.gather(*[control._refresh() for control in controls])
        if name in self._models or any(name in control._entries for control in controls):
            raise RequestRefused(f"a model {name!r} is served already", param="lora_name")

    def _is_taken(self, slot: int) -> bool:
        return any(entry.slot == slot for entry in self._entries.values())

    # ---- the list --------------------------------------------------------------------------------

    async def _change(self, entries: tuple[AdapterEntry, ...]) -> bool:
        """Replace the list that was last read; False if another front has changed it meanwhile,
        which is then read."""
        changed = AdapterList(self._version + 1, entries)
        if await self._registry.put_adapters(self._of, changed):
            self._use(changed)
            return True
        await self._refresh()
        return False

    async def _refresh(self) -> None:
        newest = await self._registry.adapters(self._of)
        if newest.version > self._version:
            self._use(newest)

    def _use(self, newest: AdapterList) -> None:
        self._version = newest.version
        entries = {entry.name: entry for entry in newest.entries}
        for name in [n for n, e in self._entries.items() if entries.get(n) != e]:
            self._served.pop(name).is_unloaded = True
        for name, entry in entries.items():
            if self._entries.get(name) != entry:
                self._fleet.adapters[entry.slot] = entry.key
                self._served[name] = AdaptedEngine(self._fleet, name, entry.slot)
        self._entries = entries

    # ---- engines that lack one -------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            try:
                await self._refresh()
                self._complete()
            except Exception as error:  # the cluster's store is down: what is loaded stays
                logger.warning("reading the adapters: %s: %s", type(error).__name__, error)
            await asyncio.sleep(_PERIOD_S)

    def _complete(self) -> None:
        """Ask every engine for those of the list that it has not."""
        for connection in self._fleet.connections:
            snapshot = connection.snapshot
            if snapshot is None or not snapshot.accepts:
                continue
            for entry in self._entries.values():
                asked = (connection.engine_id, entry)
                if (entry.slot, entry.key) in snapshot.adapters or asked in self._asked:
                    continue
                task = self._asked[asked] = asyncio.create_task(self._load_again(connection, entry))
                task.add_done_callback(partial(self._answered, asked))

    def _answered(self, asked: tuple[str, AdapterEntry], _: asyncio.Task[None]) -> None:
        self._asked.pop(asked, None)

    async def _load_again(self, connection: Connection, entry: AdapterEntry) -> None:
        try:
            await _load(connection, entry)
        except (RequestRefused, EngineUnavailable) as error:
            logger.error("engine %s has no adapter %s: %s", connection.engine_id, entry.name, error)
            if connection.is_open:
                await asyncio.sleep(_AGAIN_AFTER_S)


async def _load(connection: Connection, entry: AdapterEntry) -> None:
    """Raises RequestRefused with the engine's cause, EngineUnavailable where it cannot answer."""
    try:
        problem: str | None = await connection.ask(
            "load_adapter", entry.slot, entry.folder, entry.key, within_s=LOAD_WITHIN_S
        )
    except QuestionFailed as error:
        raise EngineUnavailable(f"the adapter was not loaded: {error}") from error
    if problem is not None:
        raise RequestRefused(problem, param="lora_path")
