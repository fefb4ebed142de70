"""Calls the pure decisions of `actors.fleet` for a front's streams."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from actors.fleet.balance import MOST_LOOKS, is_late, misses_objective, relieved, sooner_elsewhere
from actors.fleet.fleet import Fleet, FleetEngine
from actors.fleet.moves import (
    FINISHES_WITHIN_S,
    OpenStream,
    StreamMove,
    copies,
    move_streams,
    stays,
)
from actors.fleet.routers import Router
from actors.fleet.snapshot import Arrival, BitClass, short_digests
from actors.fleet.way_router import hands_over
from actors.scheduling.events import Refuse
from actors.scheduling.interfaces import QuoteRequest
from actors.scheduling.state import prefix_digests
from app.engine_client.client import RequestRefused
from app.fleet.connection import FleetRequest

_NO_BITS = BitClass("", "", "", "")  # of a stream that no engine has computed yet


class FleetRouting:
    """Chooses engines for streams; `fleet` counts each as sent."""

    def __init__(self, fleet: Fleet, router: Router, allow_inexact: bool) -> None:
        self._fleet = fleet
        self._router = router
        self._allow_inexact = allow_inexact

    def place(
        self, fleet_requests: Sequence[FleetRequest], now_s: float
    ) -> Iterator[tuple[list[FleetRequest], str | None, bool]]:
        """(streams for one engine, that engine or None, whether their bytes stay the same)."""
        groups = _groups(fleet_requests)
        streams = [self._stream(number, group[0]) for number, group in enumerate(groups)]
        for move in move_streams(
            streams, self._fleet, self._router, now_s, allow_inexact=self._allow_inexact
        ):
            group = groups[move.stream_id]
            if move.engine_id is not None:
                self._count_rest(group, move, streams[move.stream_id])
            yield group, move.engine_id, move.exact

    @property
    def accepts(self) -> bool:
        """Whether an engine takes requests."""
        return any(engine.snapshot.accepts for engine in self._fleet.engines.values())

    def is_late(self, engine_id: str) -> bool:
        """Whether requests of this engine may be better off elsewhere."""
        engine = self._fleet.engines.get(engine_id)
        return engine is not None and is_late(engine, self._fleet)

    def sooner_elsewhere(
        self, fleet_requests: Sequence[FleetRequest], now_s: float
    ) -> Iterator[tuple[list[FleetRequest], str]]:
        """The requests waiting at one engine that another engine begins much sooner, and that
        engine. fleet_requests: in the order in which they were sent."""
        groups = _groups(fleet_requests)[-MOST_LOOKS:]
        streams = [self._stream(number, group[0]) for number, group in enumerate(groups)]
        for move in sooner_elsewhere(streams, self._fleet, self._router, now_s):
            assert move.engine_id is not None
            group = groups[move.stream_id]
            self._count_rest(group, move, streams[move.stream_id])
            yield group, move.engine_id

    def relieved(
        self,
        fleet_requests: Sequence[FleetRequest],
        busy: Collection[str],
        expected: Iterable[FleetRequest],
        now_s: float,
        num_going: int,
    ) -> Iterator[tuple[FleetRequest, str]]:
        """Streams that leave one engine, since it misses its objective, and where they go. busy,
        expected: as of `copies`; num_going: copied from there already."""
        here = fleet_requests[0].connection if fleet_requests else None
        engine = None if here is None else self._fleet.engines.get(here.engine_id)
        if engine is None or not misses_objective(engine):
            return
        coming = tuple([(other.receiver_id, other.num_tokens) for other in expected])
        streams = [self._stream(number, r, coming) for number, r in enumerate(fleet_requests)]
        for move in relieved(streams, self._fleet, self._router, now_s, busy, num_going):
            assert move.engine_id is not None
            yield fleet_requests[move.stream_id], move.engine_id

    def copies(
        self,
        fleet_requests: Sequence[FleetRequest],
        busy: Collection[str],
        expected: Iterable[FleetRequest],
        now_s: float,
    ) -> Iterator[tuple[FleetRequest, str | None]]:
        """Those whose KV is to be copied now, and the engine that fetches it; None: move it as it
        is. busy: engines that copy already. expected: as of `receiver`."""
        coming = tuple([(other.receiver_id, other.num_tokens) for other in expected])
        streams = [self._stream(number, r, coming) for number, r in enumerate(fleet_requests)]
        for move in copies(streams, self._fleet, self._router, now_s, busy):
            yield fleet_requests[move.stream_id], move.engine_id

    def goes_to(self, fleet_request: FleetRequest, engine_id: str) -> bool:
        """Whether this engine can continue it exactly now; it is then counted as sent there."""
        engine = self._fleet.engines.get(engine_id)
        if engine is None or not engine.snapshot.accepts:
            return False
        if engine.snapshot.bits != fleet_request.bits:
            return False
        arrival = self._arrival_of(fleet_request)
        fleet_request.num_cached_tokens = self._fleet.sent(engine_id, arrival)
        return True

    def hands_over(self, fleet_request: FleetRequest, engine_id: str) -> bool:
        """Whether this engine, where it is sent, only begins it."""
        if fleet_request.request.pooling is not None or fleet_request.base:
            return False
        arrival = self._arrival_of(fleet_request, has_prefix=False)
        return hands_over(arrival, engine_id, self._fleet)

    def receiver(
        self, fleet_request: FleetRequest, expected: Iterable[FleetRequest], now_s: float
    ) -> str | None:
        """The engine that would continue it now; it is not counted as sent. expected: streams whose
        engine is chosen and to which they have not been sent; it may be among them."""
        others = [other for other in expected if other is not fleet_request]
        arrival = replace(
            self._arrival_of(fleet_request, has_prefix=False),
            has_begun=True,
            bits=fleet_request.bits,
            refused_by=frozenset({*fleet_request.refused_by, fleet_request.last_engine_id}),
            expected=tuple([(other.receiver_id, other.num_tokens) for other in others]),
        )
        found = self._router.choose(arrival, self._fleet, now_s)
        return None if found is None else found.engine_id

    def stays(self, fleet_request: FleetRequest) -> bool:
        """Whether a stream of a leaving engine should finish there."""
        stream = self._stream(0, fleet_request, has_prefix=False)
        return stays(stream, self._fleet, FINISHES_WITHIN_S)

    def best(self, asked: QuoteRequest, now_s: float) -> str | None:
        """The engine that would get such a request."""
        arrival = Arrival(
            asked.num_prompt_tokens, asked.max_tokens, asked.objective, tenant=asked.tenant
        )
        found = self._router.choose(arrival, self._fleet, now_s)
        return None if found is None else found.engine_id

    def digests(self, fleet_request: FleetRequest, block_size: int) -> list[bytes]:
        """Digests of its full blocks that are computed where it runs; its last token is not."""
        request = fleet_request.request
        tokens = (*request.prompt, *request.output, *fleet_request.delivered)
        return prefix_digests(tokens[:-1], block_size, request.cache_salt)

    def serving(self, fleet_request: FleetRequest) -> list[FleetEngine]:
        """Serving engines that have its adapter, including those that have refused it."""
        adapter = fleet_request.adapter
        return [
            engine
            for engine in self._fleet.engines.values()
            if engine.snapshot.accepts and (adapter is None or adapter in engine.snapshot.adapters)
        ]

    def _count_rest(self, group: Sequence[FleetRequest], move: StreamMove, one: OpenStream) -> None:
        """Count the continuations after the first, which is counted, as sent."""
        for fleet_request in group:
            fleet_request.num_cached_tokens = move.num_cached_tokens
        for fleet_request in group[1:]:
            fleet_request.prefix = group[0].prefix
            self._fleet.sent(move.engine_id or "", one.arrival)

    def _stream(
        self,
        number: int,
        fleet_request: FleetRequest,
        expected: tuple[tuple[str, int], ...] = (),
        has_prefix: bool = True,
    ) -> OpenStream:
        connection = fleet_request.connection
        return OpenStream(
            stream_id=number,
            engine_id=connection.engine_id if connection is not None else "",
            arrival=replace(self._arrival_of(fleet_request, has_prefix), expected=expected),
            bits=fleet_request.bits or _NO_BITS,
            sensitive=fleet_request.has_tokens,
            arrived_s=fleet_request.request.arrival_s,
            num_cached_tokens=fleet_request.num_cached_tokens,
        )

    def _arrival_of(self, fleet_request: FleetRequest, has_prefix: bool = True) -> Arrival:
        """The request as an engine would get it."""
        request = fleet_request.request
        num_outputs = fleet_request.base + len(fleet_request.delivered)
        return Arrival(
            num_tokens=fleet_request.num_tokens,
            max_tokens=max(0, request.sampling.max_tokens - num_outputs),
            objective=request.objective,
            prefix=_prefix(fleet_request, self._fleet) if has_prefix else (),
            tenant=request.tenant,
            refused_by=frozenset(fleet_request.refused_by),
            adapter=fleet_request.adapter,
            has_begun=fleet_request.has_tokens or fleet_request.base > 0,
            expected_by=fleet_request.receiver_id,
        )


def _groups(fleet_requests: Sequence[FleetRequest]) -> list[list[FleetRequest]]:
    """Continuations of one prompt without tokens share its computation, so they stay together."""
    by_key: dict[int, list[FleetRequest]] = {}
    for fleet_request in fleet_requests:
        key = id(fleet_request) if fleet_request.has_tokens else id(fleet_request.stream)
        by_key.setdefault(key, []).append(fleet_request)
    return list(by_key.values())


def _prefix(fleet_request: FleetRequest, fleet: Fleet) -> tuple[bytes, ...]:
    """As in `Arrival`; empty if there is no choice between engines."""
    snapshots = [engine.snapshot for engine in fleet.engines.values()]
    sizes = {snapshot.block_size for snapshot in snapshots}
    if len(snapshots) < 2 or len(sizes) != 1:
        return ()
    request = fleet_request.request
    (block_size,) = sizes
    if fleet_request.prefix is None or fleet_request.prefix[0] != block_size:
        has_states = any(snapshot.num_saved_states is not None for snapshot in snapshots)
        tokens = request.prompt[:-1] if has_states else request.prompt
        digests = prefix_digests(tokens, block_size, request.cache_salt)
        fleet_request.prefix = block_size, short_digests(digests)
    return fleet_request.prefix[1]


def refusal_of(
    fleet_request: FleetRequest, serving: Sequence[FleetEngine]
) -> RequestRefused | None:
    """The last refusal, if all of these engines have refused it; None: one may still accept it."""
    refused_by = fleet_request.refused_by
    if not refused_by or any(engine.engine_id not in refused_by for engine in serving):
        return None
    return told(list(refused_by.values())[-1])


def told(refusal: Refuse) -> RequestRefused:
    """As its client gets it."""
    return RequestRefused(refusal.message, param=refusal.param, retry_after_s=refusal.retry_after_s)
