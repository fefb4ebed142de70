"""Which engine computes a prompt, and which one continues the stream.

A request whose prompt an engine of role `prefill` computes is handed over: its KV moves, chunk by
chunk while the prompt is being read, to an engine that decodes, and with its first token the
request itself follows. `WAYS` holds the ways of dividing the work; each is one class.

    placement = way.place(arrival, roles, fleet, now_s)  # on arrival; None: none can take it now
    fleet.sent(placement.prompt.engine_id, arrival)
    # if placement.moves, once its first chunk is computed:
    receiver = way.receiver(arrival, roles, fleet, now_s)
    receiver.note_sent(1, arrival.num_tokens)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from actors.fleet.fleet import Fleet, FleetEngine, Prospect
from actors.fleet.routers.base import Router
from actors.fleet.snapshot import Arrival, Role
from actors.scheduling.registry import build_part, within

Roles = Mapping[str, Role]  # by engine_id


@dataclass(frozen=True, slots=True)
class Placement:
    """prompt: the engine that computes the prompt, with the predictions for it there.
    moves: another engine continues the stream; `Way.receiver` names it.
    """

    prompt: Prospect
    moves: bool


class Way(ABC):
    """Decides from arrival, roles and fleet alone; the caller records what it decided.

    reads_outlook: whether it needs the outlook of the snapshots.
    """

    reads_outlook: ClassVar[bool] = False

    def __init__(self, router: Router) -> None:
        """router: chooses among the engines that may compute a prompt."""
        self.router = router

    @staticmethod
    @abstractmethod
    def roles(num_prefill: int, num_decode: int) -> tuple[Role, ...]:
        """Roles of the engines, in order of their start. Raises ValueError for numbers with which
        a request could not be served."""

    @abstractmethod
    def place(self, arrival: Arrival, roles: Roles, fleet: Fleet, now_s: float) -> Placement | None:
        """Where the prompt is computed; None: no engine can take it now."""

    def receiver(
        self, arrival: Arrival, roles: Roles, fleet: Fleet, now_s: float
    ) -> FleetEngine | None:
        """The engine that continues the stream; None: none can take it now.

        Among those with room for it, if there are any, the one that expects it, else the one with
        the shortest time between tokens beside it."""
        engines = [
            engine
            for engine in fleet.candidates(arrival)
            if roles.get(engine.engine_id, Role.BOTH).decodes
        ]
        return min(engines, key=lambda engine: _crowding(engine, arrival), default=None)

    def choose(
        self, role: Role, arrival: Arrival, roles: Roles, fleet: Fleet, now_s: float
    ) -> Prospect | None:
        """The router's choice among the engines of this role."""
        others = frozenset(e for e in fleet.engines if roles.get(e, Role.BOTH) is not role)
        mine = replace(arrival, refused_by=arrival.refused_by | others)
        return self.router.choose(mine, fleet, now_s)


def _crowding(engine: FleetEngine, arrival: Arrival) -> tuple[bool, bool, float, int, int]:
    snapshot = engine.snapshot
    coming = [tokens for engine_id, tokens in arrival.expected if engine_id == snapshot.engine_id]
    held, num_live = engine.sent_tokens + sum(coming), engine.num_live + len(coming)
    free = snapshot.num_free_blocks * snapshot.block_size
    is_full = num_live >= snapshot.max_requests or held + arrival.num_tokens > free
    is_elsewhere = arrival.expected_by not in ("", snapshot.engine_id)
    num_new = len(engine.sent) + len(coming)
    tbt_s = snapshot.outlook.tbt_with_s(held + arrival.num_tokens, num_new)
    return is_full, is_elsewhere, tbt_s, snapshot.num_decode_tokens + held, num_live


class Colocated(Way):
    """Every engine computes prompts and decodes; nothing moves."""

    @staticmethod
    def roles(num_prefill: int, num_decode: int) -> tuple[Role, ...]:
        if num_prefill:
            raise ValueError("colocated engines all compute prompts: none is for prefill alone")
        return (Role.BOTH,) * num_decode

    def place(self, arrival: Arrival, roles: Roles, fleet: Fleet, now_s: float) -> Placement | None:
        there = self.router.choose(arrival, fleet, now_s)
        return None if there is None else Placement(there, moves=False)


class Split(Way):
    """Prompts on engines of their own, streams on the others (DistServe, Splitwise)."""

    @staticmethod
    def roles(num_prefill: int, num_decode: int) -> tuple[Role, ...]:
        if not (num_prefill and num_decode):
            raise ValueError("split engines need one for prefill and one for decode at least")
        return (Role.PREFILL,) * num_prefill + (Role.DECODE,) * num_decode

    def place(self, arrival: Arrival, roles: Roles, fleet: Fleet, now_s: float) -> Placement | None:
        there = self.choose(Role.PREFILL, arrival, roles, fleet, now_s)
        return None if there is None else Placement(there, moves=True)


class Flexible(Way):
    """Like `Split`, but engines that decode also compute prompts, in chunks, from their streams'
    slack.

    A prompt is computed where its stream will decode, and nothing moves, unless a prefill engine is
    predicted to give the first token sooner by a share of at least `least_gain`, or the streams
    leave less than `least_slack` of the TBT objective. Where nothing is predicted, the prompt goes
    to a prefill engine. Without objectives slack is infinite, and the first token alone decides.
    With no prefill engines it is colocated.
    """

    reads_outlook: ClassVar[bool] = True

    def __init__(self, router: Router, least_gain: float = 0.1, least_slack: float = 0.1) -> None:
        super().__init__(router)
        within(0.0, 1.0, least_gain=least_gain, least_slack=least_slack)
        self.least_gain = least_gain
        self.least_slack = least_slack

    @staticmethod
    def roles(num_prefill: int, num_decode: int) -> tuple[Role, ...]:
        if not num_decode:
            raise ValueError("flexible engines need one that decodes at least")
        return (Role.PREFILL,) * num_prefill + (Role.BOTH,) * num_decode

    def place(self, arrival: Arrival, roles: Roles, fleet: Fleet, now_s: float) -> Placement | None:
        here = self.choose(Role.BOTH, arrival, roles, fleet, now_s)
        there = self.choose(Role.PREFILL, arrival, roles, fleet, now_s)
        if there is None:
            return None if here is None else Placement(here, moves=False)
        if here is None or not (
            (1.0 - self.least_gain) * here.ttft_s <= there.ttft_s
            and _slack(here, arrival, fleet) >= self.least_slack
        ):
            return Placement(there, moves=True)
        return Placement(here, moves=False)


def _slack(there: Prospect, arrival: Arrival, fleet: Fleet) -> float:
    """What the decodes of a step leave of the TBT objective, as a share of it."""
    tbt_s = arrival.objective.tbt_s or fleet.engines[there.engine_id].snapshot.tbt_s
    return math.inf if tbt_s is None else 1.0 - there.tbt_s / tbt_s


WAYS: Mapping[str, type[Way]] = {
    "colocated": Colocated,
    "split": Split,
    "flexible": Flexible,
}


def build_way(name: str, router: Router, options: Mapping[str, Any] | None = None) -> Way:
    """The named way; raises ConfigError for a bad name or option."""
    return build_part("way", name, WAYS, options or {}, router)
