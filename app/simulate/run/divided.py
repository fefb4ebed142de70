"""A simulated fleet whose engines have roles (`actors.fleet.roles`), and whose requests move."""

from __future__ import annotations

from dataclasses import replace

from actors.fleet.moves import OpenStream
from actors.fleet.roles import Placement, build_way
from actors.fleet.snapshot import Arrival
from actors.fleet.way_router import WayRouter
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.request import Request
from app.simulate.hardware.interconnect import Links
from app.simulate.run.deployment import Division
from app.simulate.run.engine import SimulatedEngine, arrival_of
from app.simulate.run.fleet import SimulatedFleet
from app.simulate.run.handover import Handovers
from app.simulate.run.handover_parts import HandoverTotals
from app.simulate.run.replica import Replica


class DividedFleet(SimulatedFleet):
    """Engines by the deployment's `Division`. Unless it `shares_prefixes`, equal tokens are not
    equal KV: each request's blocks have names of its own."""

    def _prepare(self) -> None:
        division = self._division
        self._way = build_way(division.way, self._router, division.options)
        self._router = WayRouter(self._way)
        num_decode = self._deployment.num_replicas - division.num_prefill
        roles = self._way.roles(division.num_prefill, num_decode)
        self._roles = {f"engine-{i}": role for i, role in enumerate(roles)}
        self._predicts = self._predicts or self._way.reads_outlook
        self.handovers = Handovers(
            Links(division.interconnect),
            division.kv_bytes_per_token,
            self._record,
            ahead=division.ahead,
            find_target=self._find_target,
            submit=self._send,
            touched=self.touched,
            at=self._at,
        )

    @property
    def _division(self) -> Division:
        division = self._deployment.division
        assert division is not None
        return division

    def _config_of(self, name: str) -> SchedulerConfig:
        return self._division.config_of(self._roles[name], self._deployment.config)

    def _add(self, now_s: float) -> None:
        super()._add(now_s)
        engine = self.engines[f"engine-{len(self.all) - 1}"]
        engine.stays = self.handovers.holds
        if self._roles[engine.name].decodes:
            self.handovers.watch_second(engine)
        else:
            self.handovers.watch_first(engine)

    def submit(self, request: Request, now_s: float) -> None:
        if not self._division.shares_prefixes:
            request = replace(request, cache_salt=f"{request.request_id}")
        super().submit(request, now_s)

    def _place(self, arrival: Arrival, now_s: float) -> Placement | None:
        return self._way.place(arrival, self._roles, self._picture, now_s)

    def _begin(self, engine: SimulatedEngine, request: Request, moves: bool, now_s: float) -> bool:
        """Submit the prompt alone where another engine will continue the stream."""
        if not moves or request.sampling.max_tokens == 1:
            return self._send(engine, request, now_s)
        if self._send(engine, self.handovers.begin(request, engine), now_s):
            return True
        self.handovers.taken_back(request.request_id)
        return False

    def _go(self, stream: OpenStream, request: Request, to: str | None, now_s: float) -> None:
        """Move a stream; a prompt that waits for its first engine begins at another."""
        whole = self.handovers.taken_back(request.request_id)
        if whole is None or to is None:
            super()._go(stream, request, to, now_s)
            return
        self.moved.left(stream, now_s)
        if not self._begin(self.engines[to], whole, True, now_s):
            self._send_or_queue(whole, arrival_of(whole, self._deployment.config), now_s)

    def _find_target(self, request: Request, now_s: float) -> SimulatedEngine:
        """The engine that continues a request whose prompt another one computes."""
        arrival = arrival_of(request, self._deployment.config)
        target = self._way.receiver(arrival, self._roles, self._picture, now_s)
        if target is None:
            raise RuntimeError("no engine decodes")
        target.note_sent(1, arrival.num_tokens)
        return self.engines[target.engine_id]

    def touched(self, replica: Replica, now_s: float) -> None:
        super().touched(replica, now_s)
        self.handovers.after_event(self.engines[f"engine-{replica.index}"], now_s)

    def _reads(self, until_s: float) -> bool:
        return super()._reads(until_s) or self.handovers.seeks_target

    @property
    def has_pending(self) -> bool:
        return super().has_pending or not self.handovers.is_idle

    def handover_totals(self) -> HandoverTotals:
        return self.handovers.totals()
