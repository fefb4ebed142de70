"""Remote calls of a scheduler by the replica and fronts, answered on their socket."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from actors.calibration.outlook import outlook
from actors.engine.adapters import AdapterSlots
from actors.engine.kv_moves import KVMoves
from actors.engine.publication import Publication
from actors.engine.recovery import Recovery
from actors.executor.stage_set import StageSet
from actors.scheduling.build import check_config
from actors.scheduling.config import ConfigError
from actors.scheduling.core import Core
from actors.scheduling.events import Event, Reconfigure
from actors.scheduling.interfaces import Quote, QuoteRequest
from actors.scheduling.live_changes import plain
from actors.scheduling.statistics import statistics
from actors.transport.messages import (
    Answer,
    Ask,
    Question,
    RefusedSetting,
    SlowQuestion,
    read_value,
)

logger = logging.getLogger("legato.scheduler")

ANSWERED_LATER: frozenset[Question] = frozenset(get_args(SlowQuestion))  # by coroutines
_QUESTIONS = frozenset(get_args(Question))
_SHOWN_SETTINGS = ("policy", "token_budget", "max_step_tokens", "tbt_s", "ttft_s")


class Questions:
    """The methods that `messages.Question` names. publication: None outside a fleet."""

    def __init__(
        self,
        core: Core,
        handle: Callable[[Event], None],
        stages: StageSet,
        recovery: Recovery,
        publication: Publication | None,
        moves: KVMoves,
        slots: AdapterSlots,
    ) -> None:
        self._core = core
        self._handle = handle
        self._stages = stages
        self._recovery = recovery
        self._publication = publication
        self._moves = moves
        self._slots = slots

    def answer(self, ask: Ask) -> Answer:
        """The answer; an exception becomes an error answer, so that it does not end the engine."""
        try:
            return Answer(ask.ticket, self._method(ask)(*ask.arguments))
        except Exception as error:  # of any type, e.g. by a setting of the wrong type
            return _no_answer(ask, error)

    async def answer_later(self, ask: Ask) -> Answer:
        """The answer of a method in ANSWERED_LATER, which is a coroutine."""
        try:
            return Answer(ask.ticket, await self._method(ask)(*ask.arguments))
        except Exception as error:  # of any type: the caller waits for an answer
            return _no_answer(ask, error)

    def _method(self, ask: Ask) -> Callable[..., Any]:
        """Only what `Question` names can be called: the name comes from another process."""
        if ask.question not in _QUESTIONS:
            raise ValueError(f"no such question: {ask.question!r}")
        method: Callable[..., Any] = getattr(self, ask.question)
        return method

    async def load_adapter(self, slot: int, folder: str, key: str = "") -> str | None:
        """See `AdapterSlots.load`."""
        return await self._slots.load(slot, folder, key)

    async def kv_saved(self, request_id: int | None = None) -> None:
        """See `KVMoves.saved`."""
        await self._moves.saved(request_id)

    async def next_token(self, request_id: int) -> None:
        """See `KVMoves.next_token`."""
        await self._moves.next_token(request_id)

    async def kv_fetched(self, digests: Sequence[bytes]) -> int:
        """See `KVMoves.fetched`."""
        return await self._moves.fetched(digests)

    async def reset_prefix_cache(self) -> None:
        """See `KVMoves.reset`. Fronts learn at once that nothing is cached."""
        await self._moves.reset()
        if self._publication is not None:
            self._publication.publish()

    def quote(self, asked: Any, now_s: float) -> Quote:
        """See `Core.quote`. asked: a `QuoteRequest`, as it was sent."""
        return self._core.quote(read_value(QuoteRequest, asked), now_s)

    def try_changes(self, changes: Mapping[str, Any]) -> RefusedSetting | None:
        """What `reconfigure` would say; nothing changes."""
        changed = self._core.config.with_changes
        return _refused(changes, lambda: check_config(changed(changes), is_measured=False))

    def reconfigure(self, changes: Mapping[str, Any]) -> RefusedSetting | None:
        """Change scheduling settings live; nothing has changed if one is refused."""
        return _refused(changes, lambda: self._handle(Reconfigure(changes)))

    def stage_pids(self) -> list[list[int]]:
        """Process ids of the stage ranks, [stage][rank]."""
        return self._stages.pids

    def stand_by(self, name: str | None) -> None:
        """See `StageSet.stand_by`."""
        self._stages.stand_by(name)

    def status(self) -> dict[str, Any]:
        """The status for the console, as plain data."""
        core, publication = self._core, self._publication
        return {
            **statistics(core),
            **{name: getattr(core.config, name) for name in _SHOWN_SETTINGS},
            "step_budget": core.token_budget,  # now; `token_budget` is the setting
            "outlook": outlook(core.cost_model, core.config),
            "recoveries": self._recovery.num_recoveries,
            "rebuilding": self._recovery.is_rebuilding,
            "standby": self._stages.standby,
            "stage_pids": self._stages.pids,
            "num_fronts": 0 if publication is None else publication.num_fronts,
            "pid": os.getpid(),
        }

    def leave(self) -> None:
        """Publish that this engine takes no new requests."""
        if self._publication is not None:
            self._publication.leave()


def _refused(changes: Mapping[str, Any], change: Callable[[], None]) -> RefusedSetting | None:
    """The refusal names the setting as these changes do, with its section or without."""
    try:
        change()
    except ConfigError as error:
        key = next((key for key in changes if plain(key) == error.key), error.key)
        return RefusedSetting(key, key + str(error).removeprefix(error.key))
    return None


def _no_answer(ask: Ask, error: Exception) -> Answer:
    logger.error("error in %s%r", ask.question, ask.arguments, exc_info=error)
    return Answer(ask.ticket, None, f"{type(error).__name__}: {error}")
