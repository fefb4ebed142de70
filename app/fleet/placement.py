"""From travellers to the pure decisions of `actors.fleet`, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from actors.fleet.fleet import Fleet, Sight
from actors.fleet.moves import OpenStream, move_streams, stays
from actors.fleet.routers import Router
from actors.fleet.snapshot import Arrival, BitClass, short_digests
from actors.scheduling.request import Objective
from actors.scheduling.state import prefix_digests
from app.engine.client import RequestRefused
from app.fleet.connection import Traveller

_NO_BITS = BitClass("", "", "", "")  # of what was never computed anywhere
_FINISHES_WITHIN_S = 5.0  # a stream of an engine that leaves and ends so soon is not moved


class Placement:
    """Where streams go; the picture `fleet` is told of each as sent."""

    def __init__(self, fleet: Fleet, router: Router, allow_inexact: bool) -> None:
        self._fleet = fleet
        self._router = router
        self._allow_inexact = allow_inexact

    def place(
        self, travellers: Sequence[Traveller], now_s: float
    ) -> Iterator[tuple[list[Traveller], str | None, bool]]:
        """(travellers that go together, engine or None, whether their bytes stay the same).

        The continuations of a prompt that have no tokens yet share its computation: they go
        together."""
        parties: dict[int, list[Traveller]] = {}
        for traveller in travellers:
            key = id(traveller) if traveller.has_tokens else id(traveller.stream)
            parties.setdefault(key, []).append(traveller)
        groups = list(parties.values())
        streams = [
            OpenStream(
                stream_id=number,
                engine_id=group[0].home.engine_id if group[0].home is not None else "",
                arrival=arrival_of(group[0], self._fleet),
                bits=group[0].bits or _NO_BITS,
                sensitive=group[0].has_tokens,
            )
            for number, group in enumerate(groups)
        ]
        for move in move_streams(
            streams, self._fleet, self._router, now_s, allow_inexact=self._allow_inexact
        ):
            group = groups[move.stream_id]
            if move.engine_id is not None:
                for _ in group[1:]:  # the first is told already
                    self._fleet.sent(move.engine_id, streams[move.stream_id].arrival)
            yield group, move.engine_id, move.exact

    def stays(self, traveller: Traveller) -> bool:
        """Whether a stream of an engine that leaves should end there."""
        stream = OpenStream(
            0,
            traveller.home.engine_id if traveller.home is not None else "",
            arrival_of(traveller, self._fleet),
            traveller.bits or _NO_BITS,
        )
        return stays(stream, self._fleet, _FINISHES_WITHIN_S)

    def best(
        self, num_tokens: int, max_tokens: int, objective: Objective, tenant: str, now_s: float
    ) -> str | None:
        """The engine that would get such a request."""
        arrival = Arrival(num_tokens, max_tokens, objective, tenant=tenant)
        found = self._router.choose(arrival, self._fleet, now_s)
        return None if found is None else found.engine_id


def arrival_of(traveller: Traveller, fleet: Fleet) -> Arrival:
    """It as it would arrive somewhere now."""
    request = traveller.request
    num_outputs = traveller.base + len(traveller.delivered)
    return Arrival(
        num_tokens=traveller.num_tokens,
        max_tokens=max(0, request.sampling.max_tokens - num_outputs),
        objective=request.objective,
        prefix=_prefix(traveller, fleet),
        tenant=request.tenant,
        refused_by=frozenset(traveller.refused_by),
    )


def _prefix(traveller: Traveller, fleet: Fleet) -> tuple[bytes, ...]:
    """Digests of the prompt's blocks, where there is a choice to be made by them."""
    sizes = {sight.snapshot.block_size for sight in fleet.engines.values()}
    if len(fleet.engines) < 2 or len(sizes) != 1:
        return ()
    request = traveller.request
    (block_size,) = sizes
    return short_digests(prefix_digests(request.prompt, block_size, request.cache_salt))


def refusal_of(traveller: Traveller, serving: Sequence[Sight]) -> RequestRefused | None:
    """What the last engine said, if all of these have refused it; None: one may have it yet."""
    said = traveller.refusal
    if said is None or any(sight.engine_id not in traveller.refused_by for sight in serving):
        return None
    return RequestRefused(said.message, param=said.param, retry_after_s=said.retry_after_s)
