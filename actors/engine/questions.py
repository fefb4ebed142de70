"""What the replica and fronts may ask of a scheduler, answered on their socket."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from actors.calibration.outlook import outlook
from actors.engine.publication import Publication
from actors.engine.recovery import Recovery
from actors.executor.stage_set import StageSet
from actors.scheduling.core import Core
from actors.scheduling.events import Event, Reconfigure
from actors.scheduling.interfaces import Quote
from actors.scheduling.statistics import statistics
from actors.transport.messages import Answer, Ask

logger = logging.getLogger("legato.scheduler")

_SHOWN_SETTINGS = ("policy", "token_budget", "max_step_tokens", "tbt_s", "ttft_s")


class Questions:
    """Every method that `messages.Question` names is one. publication: None outside a fleet."""

    def __init__(
        self,
        core: Core,
        handle: Callable[[Event], None],
        stages: StageSet,
        recovery: Recovery,
        publication: Publication | None,
    ) -> None:
        self._core = core
        self._handle = handle
        self._stages = stages
        self._recovery = recovery
        self._publication = publication

    def answer(self, ask: Ask) -> Answer:
        """A question that cannot be answered must not cost the replica its engine."""
        try:
            return Answer(ask.ticket, getattr(self, ask.question)(*ask.arguments))
        except Exception as error:  # anything that a setting of the wrong type may raise
            return _no_answer(ask, error)

    async def answer_later(self, ask: Ask) -> Answer:
        """The same where the answer takes its time."""
        try:
            return Answer(ask.ticket, await getattr(self, ask.question)(*ask.arguments))
        except Exception as error:  # whatever it is, the asking side needs an answer
            return _no_answer(ask, error)

    async def load_adapter(self, slot: int, folder: str) -> str | None:
        """As of `StageSet.load_adapter`."""
        return await self._stages.load_adapter(slot, folder)

    def quote(self, *arguments: Any) -> Quote:
        """As of `Core.quote`."""
        return self._core.quote(*arguments)

    def reconfigure(self, changes: Mapping[str, Any]) -> str | None:
        """Change scheduling settings live; returns what is wrong with them, if anything."""
        try:
            self._handle(Reconfigure(changes))
        except ValueError as error:
            return str(error)
        return None

    def stage_pids(self) -> list[list[int]]:
        """Process ids of the stage ranks, [stage][rank]."""
        return self._stages.pids

    def status(self) -> dict[str, Any]:
        """A snapshot for the console: plain data."""
        core = self._core
        return {
            **statistics(core),
            **{name: getattr(core.config, name) for name in _SHOWN_SETTINGS},
            "outlook": outlook(core.cost_model, core.config),
            "recoveries": self._recovery.num_recoveries,
            "rebuilding": self._recovery.is_rebuilding,
            "pid": os.getpid(),
        }

    def leave(self) -> None:
        """Publish that this engine takes nothing more."""
        if self._publication is not None:
            self._publication.leave()


def _no_answer(ask: Ask, error: Exception) -> Answer:
    logger.error("no answer to %s%r", ask.question, ask.arguments, exc_info=error)
    return Answer(ask.ticket, None, f"{type(error).__name__}: {error}")
