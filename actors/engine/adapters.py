"""Loads adapters into the slots of a running engine, and publishes which slots hold which."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping

from actors.engine.publication import Publication
from actors.executor.stage_set import StageSet
from actors.scheduling.core import Core
from actors.scheduling.events import AdapterLoads, Event, Refuse
from actors.scheduling.request import Request

_FREE_WITHIN_S = 5.0  # a slot whose requests have been aborted; of others it is still used
_LOOK_EVERY_S = 0.05


class AdapterSlots:
    """publication: None outside a fleet. handle: passes an event to the core. waiting: adapters of
    requests, by id, that are yet to be submitted to the core."""

    def __init__(
        self,
        core: Core,
        handle: Callable[[Event], None],
        stages: StageSet,
        publication: Publication | None,
        waiting: Mapping[int, int],
    ) -> None:
        self._core = core
        self._handle = handle
        self._stages = stages
        self._publication = publication
        self._waiting = waiting
        self._held = dict(stages.adapters)  # slot: what snapshots call its adapter
        self._locks: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._num_loads = 0

    async def load(self, slot: int, folder: str, key: str = "") -> str | None:
        """Fill a slot on every rank; returns an error message or None.

        key: what snapshots call it, the folder by default. One that the slot holds is not loaded
        again, as several fronts may ask for it.
        """
        async with self._locks[slot]:
            if key and self._held.get(slot) == key:
                return None
            if users := await self._users(slot):
                return f"adapter slot {slot} is still used by {users} requests"
            self._hold(slot, None)  # before it is touched: fronts send nothing more
            self._loads(+1)
            try:
                problem = await self._stages.load_adapter(slot, folder)
            finally:
                self._loads(-1)
            if problem is None:
                self._hold(slot, key or folder)
            return problem

    def refusal(self, request: Request) -> Refuse | None:
        """Of a request whose slot holds no adapter: on the stages its steps would fail."""
        slot = request.adapter - 1
        if slot < 0 or slot in self._held:
            return None
        problem = f"no adapter is loaded in slot {slot}: it has been lost, or is being replaced"
        return Refuse(request.request_id, problem, "model")

    def stages_built(self) -> list[Refuse]:
        """Empty the slots that the new stages could not fill; of the requests that used them."""
        for slot in self._held.keys() - self._stages.adapters.keys():
            self._hold(slot, None)
        states = self._core.live_requests.values()
        refusals = [self.refusal(state.request) for state in states]
        return [refusal for refusal in refusals if refusal is not None]

    async def _users(self, slot: int) -> int:
        """Requests that use the slot, once those that end now have done so."""
        for _ in range(int(_FREE_WITHIN_S / _LOOK_EVERY_S)):
            if not self._num_users(slot):
                return 0
            await asyncio.sleep(_LOOK_EVERY_S)
        return self._num_users(slot)

    def _num_users(self, slot: int) -> int:
        live = [state.request.adapter for state in self._core.live_requests.values()]
        return [*live, *self._waiting.values()].count(slot + 1)

    def _hold(self, slot: int, key: str | None) -> None:
        if key is None:
            self._held.pop(slot, None)
        else:
            self._held[slot] = key
        if self._publication is not None:
            self._publication.holds_adapters(tuple(sorted(self._held.items())))

    def _loads(self, change: int) -> None:
        self._num_loads += change
        self._handle(AdapterLoads(self._num_loads))
