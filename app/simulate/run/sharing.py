"""A simulated fleet whose engines share KV: streams move with it, as in live fleets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from actors.fleet.balance import relieved
from actors.fleet.moves import COPIES_FOR_S, OpenStream, StreamMove, copies, move_streams, stays
from actors.scheduling.config import SchedulerConfig
from app.simulate.hardware.interconnect import Links
from app.simulate.run.copies import Copy, StreamCopies
from app.simulate.run.engine import SimulatedEngine
from app.simulate.run.fleet import SimulatedFleet
from app.simulate.run.moved import MoveTotals
from app.simulate.run.replica import Replica
from app.simulate.run.transfers import Transfers


class SharingFleet(SimulatedFleet):
    """Engines by the deployment's `SharedKV`. The cores decide what is fetched and what is computed
    again, by their cost models."""

    def _prepare(self) -> None:
        shared = self._deployment.shared_kv
        assert shared is not None
        self._transfers = Transfers(
            Links(shared.interconnect),
            shared.kv_bytes_per_token,
            self.engines,
            self.touched,
            self._at,
        )
        self._copies = StreamCopies(
            self._is_alive, self.touched, self._at, self._copied, self._more
        )

    def _config_of(self, name: str) -> SchedulerConfig:
        return replace(self._deployment.config, tier_ranks=1, tier_shared=True)

    def _add(self, now_s: float) -> None:
        super()._add(now_s)
        self._transfers.watch(self.engines[f"engine-{len(self.all) - 1}"])

    def touched(self, replica: Replica, now_s: float) -> None:
        super().touched(replica, now_s)
        self._copies.look(now_s)

    def _is_alive(self, engine: SimulatedEngine) -> bool:
        return self.engines.get(engine.name) is engine

    def _retire(self, engine: SimulatedEngine, now_s: float) -> None:
        super()._retire(engine, now_s)
        self._copies.lost(engine)

    @property
    def has_pending(self) -> bool:
        return super().has_pending or self._transfers.num_open > 0

    def move_totals(self) -> MoveTotals | None:
        links = self._transfers.links
        return self.moved.totals(links.num_bytes, max(links.busy_s.values(), default=0.0))

    # ---- what leaves ------------------------------------------------------------------

    def _told(self, engine: SimulatedEngine, now_s: float) -> None:
        if engine.accepts:
            super()._told(engine, now_s)
        else:
            self._evacuate(engine, now_s)

    def _relieve(
        self, engine: SimulatedEngine, now_s: float, running: Sequence[OpenStream]
    ) -> Sequence[StreamMove]:
        """None moves now: they are copied first."""
        open_copies = self._copies.open
        num_going = sum([copy.source is engine for copy in open_copies.values()])
        coming = [self._expecting(s) for s in running if s.stream_id not in open_copies]
        for move in relieved(
            coming, self._picture, self._router, now_s, self._copies.busy, num_going
        ):
            self._begin_copy(engine, move.stream_id, move.engine_id or "", now_s)
        return ()

    def _evacuate(self, engine: SimulatedEngine, now_s: float) -> None:
        """Begin to copy, or move, the next streams of an engine that drains."""
        found = {
            stream.stream_id: (self._expecting(stream), request)
            for stream, request in engine.streams()
            if stream.stream_id not in self._copies.open
            and not stays(stream, self._picture, engine.drain_s)
        }
        at_once = [stream for stream, _ in found.values()]
        if now_s - engine.leaving_since_s <= COPIES_FOR_S:
            begun = [stream for stream in at_once if stream.sensitive]
            at_once = [stream for stream in at_once if not stream.sensitive]
            for move in copies(begun, self._picture, self._router, now_s, self._copies.busy):
                if move.engine_id is not None:
                    self._begin_copy(engine, move.stream_id, move.engine_id, now_s)
        for move in move_streams(at_once, self._picture, self._router, now_s):
            if move.engine_id is not None:  # else it stays, until an engine can take it
                engine.replica.withdraw([move.stream_id], now_s)
                self._go(*found[move.stream_id], move.engine_id, now_s)
        self._evacuated(engine, now_s)
        self._copies.look(now_s)

    def _expecting(self, stream: OpenStream) -> OpenStream:
        """The stream, with those that engines expect because they fetch their KV."""
        return replace(stream, arrival=replace(stream.arrival, expected=self._copies.expected))

    def _begin_copy(self, engine: SimulatedEngine, stream_id: int, name: str, now_s: float) -> None:
        state = engine.replica.core.live_requests[stream_id]
        self._copies.begin(state, engine, self.engines[name], now_s)

    def _more(self, engine: SimulatedEngine, now_s: float) -> None:
        engine.balanced_s = now_s
        if not engine.accepts and self._is_alive(engine):
            self._evacuate(engine, now_s)

    def _copied(self, copy: Copy, now_s: float) -> None:
        """It goes where its KV is; from an engine that drains, if need be, to another."""
        engine, is_leaving = copy.source, not copy.source.accepts
        found = engine.stream(copy.stream_id) if self._is_alive(engine) else None
        if found is not None and (copy.is_whole or is_leaving):
            stream, request = found
            to = self._target(copy, stream, is_leaving, now_s)
            if to is not None:
                self.moved.num_copied += copy.is_whole
                engine.replica.withdraw([stream.stream_id], now_s)
                self._go(stream, request, to, now_s)
                self.touched(engine.replica, now_s)
        if self._is_alive(engine):
            self._more(engine, now_s)

    def _target(self, copy: Copy, stream: OpenStream, is_leaving: bool, now_s: float) -> str | None:
        name = copy.target.name
        if is_leaving:
            arrival = replace(stream.arrival, expected_by=name)
            one = replace(stream, arrival=arrival)
            return move_streams([one], self._picture, self._router, now_s)[0].engine_id
        if not self._is_alive(copy.target) or not copy.target.accepts:
            return None
        self._picture.sent(name, stream.arrival)
        return name
