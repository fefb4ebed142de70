"""The engines of one run and a front that knows them by their snapshots.

Routing, scaling, failover and draining are the code of `actors.fleet` that live fronts run; this
module decides only when things happen.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from actors.fleet.fleet import Fleet
from actors.fleet.moves import OpenStream, move_streams, stays
from actors.fleet.roles import Placement
from actors.fleet.routers import build_router
from actors.fleet.scaling import EngineLoad, build_scaling, load_of
from actors.fleet.snapshot import Arrival, EngineSnapshot, EngineState, PrefixUpdate, Role
from actors.scheduling.build import build_core
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.events import Refuse, Submit
from actors.scheduling.request import Request
from app.simulate.run.balance import leaving
from app.simulate.run.deployment import Autoscale, Deployment
from app.simulate.run.engine import SimulatedEngine, arrival_of
from app.simulate.run.handover_parts import HandoverTotals
from app.simulate.run.record import RunRecord
from app.simulate.run.replica import INFINITY, Replica, TokenOf
from app.simulate.run.timers import Timers


class SimulatedFleet:
    """The engines of one run, with their router and scaling policy."""

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
        self._order = self._num_starting = 0
        self.all: list[Replica] = []
        self.engines: dict[str, SimulatedEngine] = {}  # alive, by name
        self.replica_seconds = 0.0
        self.scaling: list[tuple[float, int]] = []
        self.loads: list[Mapping[str, EngineLoad]] = []  # the inputs of scaling
        self.moves: list[tuple[float, int]] = []  # (time, request)
        self.queued: deque[tuple[Request, Arrival]] = deque()  # no engine can take these now
        self.next_arrival_s = -INFINITY  # kept by the caller; too early is harmless
        self._roles: Mapping[str, Role] = {}  # by name; of the others: both
        self._sending = -1  # the request being submitted to an engine
        self._refusal: Refuse | None = None  # its refusal, if any
        self._picture = Fleet()
        seeded = {"seed": seed} if deployment.routing == "power_of_two" else {}
        self._router = build_router(deployment.routing, {**seeded, **deployment.routing_options})
        scale = deployment.autoscale
        self._scaling = build_scaling(scale.scaling, scale.options) if scale else None
        self._predicts = self._router.reads_outlook  # whether snapshots hold predictions
        self._prepare()
        for _ in range(deployment.num_replicas):
            self._start(0.0)
        self._alone = self.all[0] if deployment.is_lone else None
        if scale is not None:
            self._at(scale.interval_s, self._scale)
        for time_s, index in deployment.failures:
            self._at(time_s, partial(self.fail, f"engine-{index}"))

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
        always = d.autoscale is not None or d.failures or d.config.prefix_cache or d.rebalance
        return bool(always or self.queued) or self.next_arrival_s <= until_s

    @property
    def has_pending(self) -> bool:
        """Whether requests wait outside the engines."""
        return bool(self.queued)

    def handover_totals(self) -> HandoverTotals | None:
        return None

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

    def _start(self, now_s: float) -> None:
        d, index = self._deployment, len(self.all)
        name = f"engine-{index}"
        config, acceptance = d.drafting(self._config_of(name), self._seed)
        replica = Replica(
            build_core(config, cost_model=OnlineCostModel(d.believed or d.model)),
            d.model,
            self._record,
            index=index,
            jitter=d.jitter,
            ratios=d.ratios,
            seed=self._seed,
            host_s=d.host_s,
            token_of=self._token_of,
            acceptance=acceptance,
        )
        self.all.append(replica)
        role = self._roles.get(name, Role.BOTH)
        engine = self.engines[name] = SimulatedEngine(replica, now_s, role)
        if d.is_lone:
            return
        replica.on_refuse = self._refused
        self._picture.published(engine.snapshot(now_s, self._predicts), now_s)
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
        self._picture.published(snapshot, now_s)
        if update is not None:
            self._picture.update_prefixes(update)
        engine = self.engines[snapshot.engine_id]
        if self._deployment.rebalance and engine.accepts:
            for stream, request, name in leaving(engine, self._picture, self._router, now_s):
                self._go(stream, request, name, now_s)
            self.touched(engine.replica, now_s)
        self._send_queued(now_s)

    def fail(self, name: str, now_s: float) -> None:
        """The engine dies; its requests continue on other engines."""
        engine = self.engines.get(name)
        if engine is None:
            return
        streams = engine.streams()
        self._retire(engine, now_s)
        self._move(streams, now_s)

    def _drain(self, engine: SimulatedEngine, scale: Autoscale, now_s: float) -> None:
        """Accept nothing new; move streams that would take too long, and finish the rest."""
        engine.state = EngineState.DRAINING
        self._picture.published(engine.snapshot(now_s, self._predicts), now_s)
        moved = [s for s in engine.streams() if not stays(s[0], self._picture, scale.drain_s)]
        engine.replica.withdraw([stream.stream_id for stream, _ in moved], now_s)
        self._move(moved, now_s)
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
        self._route(request, arrival_of(request, self._deployment.config), now_s)

    def _route(self, request: Request, arrival: Arrival, now_s: float) -> bool:
        """Send a request to an engine, or to another if it refuses; False: it must wait."""
        for _ in range(1 + self._deployment.num_retries):
            placement = self._place(arrival, now_s)
            if placement is None:
                break
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
        self.queued.append((request, arrival))
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
                return

    # ---- streams move -----------------------------------------------------------------

    def _move(self, streams: Iterable[tuple[OpenStream, Request]], now_s: float) -> None:
        found = {one[0].stream_id: one for one in streams}
        known = [stream for stream, _ in found.values()]
        for move in move_streams(known, self._picture, self._router, now_s):
            self._go(*found[move.stream_id], move.engine_id, now_s)

    def _go(self, stream: OpenStream, request: Request, to: str | None, now_s: float) -> None:
        self.moves.append((now_s, stream.stream_id))
        if to is None:
            self.queued.append((request, stream.arrival))
        elif not self._send(self.engines[to], request, now_s):
            self._route(request, stream.arrival, now_s)

    # ---- scaling ----------------------------------------------------------------------

    def _scale(self, now_s: float) -> None:
        """Apply the policy: start engines (after the cold start) and drain others."""
        scale, scaling = self._deployment.autoscale, self._scaling
        if scale is None or scaling is None:
            return
        self._at(now_s + scale.interval_s, self._scale)
        loads = {
            name: load_of(engine.publisher.snapshot(now_s, engine.state), now_s)
            for name, engine in self.engines.items()
        }
        wanted = scaling.wanted(loads, self._num_starting, len(self.queued), now_s, scale.bounds)
        self.scaling.append((now_s, wanted))
        self.loads.append(loads)
        serving = [e for e in self.engines.values() if e.accepts]
        for _ in range(wanted - len(serving) - self._num_starting):
            self._num_starting += 1
            self._at(now_s + scale.start_s, self._started)
        if self._num_starting == 0 and len(serving) > wanted:
            serving.sort(key=lambda engine: engine.replica.num_live)
            for engine in serving[: len(serving) - wanted]:
                self._drain(engine, scale, now_s)

    def _started(self, now_s: float) -> None:
        self._num_starting -= 1
        self._start(now_s)
        self._send_queued(now_s)
