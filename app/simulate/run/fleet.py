"""The engines of one run and a front that knows them by their snapshots.

Routing, failover and draining are the code of `actors.fleet` that live fronts run; this module
decides only when things happen.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from actors.fleet.fleet import Fleet
from actors.fleet.moves import FINISHES_WITHIN_S, OpenStream, StreamMove, move_streams, stays
from actors.fleet.roles import Placement
from actors.fleet.routers import build_router
from actors.fleet.snapshot import Arrival, EngineSnapshot, EngineState, PrefixUpdate, Role
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.events import Refuse, Submit
from actors.scheduling.request import Request
from app.simulate.run.balance import leaving, relieved_at_once
from app.simulate.run.deployment import Deployment
from app.simulate.run.engine import SimulatedEngine, arrival_of
from app.simulate.run.handover_parts import HandoverTotals
from app.simulate.run.moved import MovedStreams, MoveTotals
from app.simulate.run.record import RunRecord
from app.simulate.run.replica import INFINITY, Replica, TokenOf, build_replica
from app.simulate.run.timers import Timers


class SimulatedFleet:
    """The engines of one run, with their router; a `Scaler` may start and drain them."""

    def __init__(
        self, deployment: Deployment, record: RunRecord, seed: int, token_of: TokenOf | None
    ) -> None:
        self._deployment = deployment
        self._record = record
        self._seed = seed
        self._token_of = token_of
        self._heap: list[tuple[float, int, Replica]] = []
        self.timers = Timers()
        self._at = self.timers.at
        self._order = 0
        self.all: list[Replica] = []
        self.engines: dict[str, SimulatedEngine] = {}  # alive, by name
        self.replica_seconds = 0.0
        self.moved = MovedStreams(record)
        self.queued: deque[tuple[Request, Arrival]] = deque()  # no engine can take these now
        self.next_arrival_s = -INFINITY  # kept by the caller; too early is harmless
        self._roles: Mapping[str, Role] = {}  # by name; of the others: both
        self._sending = -1  # the request being submitted to an engine
        self._refusal: Refuse | None = None  # its refusal, if any
        self._picture = Fleet()
        seeded = {"seed": seed} if deployment.routing == "power_of_two" else {}
        self._router = build_router(deployment.routing, {**seeded, **deployment.routing_options})
        self._predicts = self._router.reads_outlook  # whether snapshots hold predictions
        self._prepare()
        for _ in range(deployment.num_replicas):
            self._add(0.0)
        self._alone = self.all[0] if deployment.is_lone else None
        for time_s, index in deployment.failures:
            self._at(time_s, partial(self.fail, f"engine-{index}"))
        for time_s, index in deployment.drains:
            self._at(time_s, partial(self._leave, f"engine-{index}"))

    # ---- what engines with roles do otherwise -----------------------------------------------

    def _prepare(self) -> None:
        """Called before the first engine starts."""

    def _config_of(self, name: str) -> SchedulerConfig:
        return self._deployment.config

    def _place(self, arrival: Arrival, now_s: float) -> Placement | None:
        there = self._router.choose(arrival, self._picture, now_s)
        return None if there is None else Placement(there, moves=False)

    def _begin(self, engine: SimulatedEngine, request: Request, moves: bool, now_s: float) -> bool:
        """Submit a request to its first engine; returns whether that accepted it."""
        return self._send(engine, request, now_s)

    def _reads(self, until_s: float) -> bool:
        """Whether the picture may be read by then: what will not be read need not be predicted."""
        d = self._deployment
        always = d.autoscale is not None or d.config.prefix_cache or d.rebalance
        return (
            bool(always or d.failures or d.drains or self.queued) or self.next_arrival_s <= until_s
        )

    @property
    def has_pending(self) -> bool:
        """Whether requests wait outside the engines."""
        return bool(self.queued)

    def handover_totals(self) -> HandoverTotals | None:
        return None

    def move_totals(self) -> MoveTotals | None:
        """Totals of the streams that moved; None: none did."""
        return self.moved.totals()

    def earliest(self) -> Replica | None:
        """The replica whose next event comes first."""
        if self._alone is not None:
            return self._alone
        heap = self._heap
        while heap:
            time_s, _, replica = heap[0]
            if replica.next_s == time_s:
                return replica
            heapq.heappop(heap)  # superseded by a later push
        return None

    def touched(self, replica: Replica, now_s: float) -> None:
        """Note a replica's new time after a change; retire it if it has drained."""
        if self._alone is not None:
            return
        self.moved.look(replica)
        engine = self.engines.get(f"engine-{replica.index}")
        if engine is None:  # dead
            replica.next_s = INFINITY
            return
        engine.changed = True
        if replica.next_s != INFINITY:
            self._order += 1
            heapq.heappush(self._heap, (replica.next_s, self._order, replica))
        elif replica.num_live == 0 and engine.state is EngineState.DRAINING:
            self._retire(engine, self._record.end_s)

    # ---- engines come and go ----------------------------------------------------------

    def start(self, now_s: float) -> None:
        """One engine more, which takes what waits."""
        self._add(now_s)
        self._send_queued(now_s)

    def _add(self, now_s: float) -> None:
        d, index = self._deployment, len(self.all)
        name = f"engine-{index}"
        config = self._config_of(name)
        replica = build_replica(d, config, self._record, index, self._seed, self._token_of)
        self.all.append(replica)
        role = self._roles.get(name, Role.BOTH)
        engine = self.engines[name] = SimulatedEngine(replica, now_s, role)
        if d.is_lone:
            return
        replica.on_refuse = self._refused
        self.moved.watch(replica)
        self._picture.published(engine.snapshot(now_s, self._predicts))
        # Engines publish at different times.
        first_s = now_s + d.publish_s * (1.0 + (index * 0.618) % 1.0)
        self._at(first_s, partial(self._publish, engine))

    def _publish(self, engine: SimulatedEngine, now_s: float) -> None:
        if engine.name not in self.engines:
            return
        d = self._deployment
        next_s = now_s + d.publish_s
        if engine.changed:
            engine.changed, engine.unseen_s = False, now_s
        if engine.unseen_s is not None and self._reads(next_s + d.delay_s):
            snapshot = engine.snapshot(engine.unseen_s, self._predicts)
            update = engine.publisher.prefix_update() if d.config.prefix_cache else None
            self._at(now_s + d.delay_s, partial(self._published, snapshot, update))
        self._at(next_s, partial(self._publish, engine))

    def _published(
        self, snapshot: EngineSnapshot, update: PrefixUpdate | None, now_s: float
    ) -> None:
        if snapshot.engine_id not in self.engines:
            return
        self._picture.published(snapshot)
        if update is not None:
            self._picture.update_prefixes(update)
        self._told(self.engines[snapshot.engine_id], now_s)
        self._send_queued(now_s)

    def _told(self, engine: SimulatedEngine, now_s: float) -> None:
        """An engine has published how it is: what has to move because of that moves."""
        if not (self._deployment.rebalance and engine.accepts):
            return
        relieve = partial(self._relieve, engine, now_s)
        for found in leaving(engine, self._picture, self._router, now_s, relieve):
            self._go(*found, now_s)
        self.touched(engine.replica, now_s)

    def _relieve(
        self, engine: SimulatedEngine, now_s: float, running: Sequence[OpenStream]
    ) -> Sequence[StreamMove]:
        """The streams that move now from an engine that misses its objective."""
        return relieved_at_once(running, self._picture, self._router, now_s)

    def fail(self, name: str, now_s: float) -> None:
        """The engine dies; its requests continue on other engines."""
        engine = self.engines.get(name)
        if engine is None:
            return
        streams = engine.streams()
        self._retire(engine, now_s)
        self._move(streams, now_s)

    def _leave(self, name: str, now_s: float) -> None:
        engine = self.engines.get(name)
        if engine is not None and engine.accepts:
            self.drain(engine, FINISHES_WITHIN_S, now_s)

    def drain(self, engine: SimulatedEngine, drain_s: float, now_s: float) -> None:
        """Accept nothing new; move streams that would take longer, and finish the rest."""
        engine.state, engine.drain_s, engine.leaving_since_s = EngineState.DRAINING, drain_s, now_s
        self._picture.published(engine.snapshot(now_s, self._predicts))
        self._evacuate(engine, now_s)

    def _evacuate(self, engine: SimulatedEngine, now_s: float) -> None:
        leaving = [s for s in engine.streams() if not stays(s[0], self._picture, engine.drain_s)]
        engine.replica.withdraw([stream.stream_id for stream, _ in leaving], now_s)
        self._move(leaving, now_s)
        self._evacuated(engine, now_s)

    def _evacuated(self, engine: SimulatedEngine, now_s: float) -> None:
        """Retire an engine that drains once nothing is left on it."""
        if engine.replica.num_live == 0:
            self._retire(engine, now_s)
        else:
            self.touched(engine.replica, now_s)

    def _retire(self, engine: SimulatedEngine, now_s: float) -> None:
        del self.engines[engine.name]
        engine.replica.next_s = INFINITY  # steps in flight are lost
        self._picture.lost(engine.name)
        self.replica_seconds += max(0.0, now_s - engine.started_s)

    def close(self, now_s: float) -> None:
        for engine in self.engines.values():
            self.replica_seconds += max(0.0, now_s - engine.started_s)

    # ---- requests ---------------------------------------------------------------------

    def submit(self, request: Request, now_s: float) -> None:
        if self._alone is not None:
            self._alone.num_live += 1
            self._alone.submit(Submit(request), now_s)
            return
        self._send_or_queue(request, arrival_of(request, self._deployment.config), now_s)

    def _send_or_queue(self, request: Request, arrival: Arrival, now_s: float) -> None:
        if not self._route(request, arrival, now_s):
            self.queued.append((request, arrival))

    def _route(self, request: Request, arrival: Arrival, now_s: float) -> bool:
        """Send a request to an engine, or to another while they refuse; False: it must wait."""
        while (placement := self._place(arrival, now_s)) is not None:
            name = placement.prompt.engine_id
            cached = self._picture.sent(name, arrival)
            if self._deployment.rebalance:
                self.engines[name].cached[request.request_id] = cached
            if self._begin(self.engines[name], request, placement.moves, now_s):
                return True
            arrival = replace(arrival, refused_by=arrival.refused_by | {name})
        if arrival.refused_by and self._refusal is not None:
            self._record.refused(self._refusal, now_s)
            return True
        return False

    def _send(self, engine: SimulatedEngine, request: Request, now_s: float) -> bool:
        """Submit a request; returns whether the engine accepted it."""
        engine.num_received += 1
        replica = engine.replica
        self._record.replica[request.request_id] = replica.index
        self._sending, self._refusal = request.request_id, None
        replica.num_live += 1
        replica.submit(Submit(request), now_s)
        self._sending = -1
        self.touched(replica, now_s)
        return self._refusal is None

    def _refused(self, refusal: Refuse, now_s: float) -> None:
        """A request refused on arrival may go to another engine; one that timed out ends."""
        if refusal.request_id == self._sending:
            self._refusal = refusal
        else:
            self._record.refused(refusal, now_s)

    def _send_queued(self, now_s: float) -> None:
        for _ in range(len(self.queued)):
            request, arrival = self.queued.popleft()
            if not self._route(request, arrival, now_s):
                self.queued.appendleft((request, arrival))
                return

    # ---- streams move -----------------------------------------------------------------

    def _move(self, streams: Iterable[tuple[OpenStream, Request]], now_s: float) -> None:
        found = {one[0].stream_id: one for one in streams}
        known = [stream for stream, _ in found.values()]
        for move in move_streams(known, self._picture, self._router, now_s):
            self._go(*found[move.stream_id], move.engine_id, now_s)

    def _go(self, stream: OpenStream, request: Request, to: str | None, now_s: float) -> None:
        self.moved.left(stream, now_s)
        if to is None:
            self.queued.append((request, stream.arrival))
        elif not self._send(self.engines[to], request, now_s):
            self._send_or_queue(request, stream.arrival, now_s)
