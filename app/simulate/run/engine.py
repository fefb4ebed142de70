"""A simulated engine as a fleet sees it: its snapshots and its movable streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from actors.fleet.moves import OpenStream
from actors.fleet.publish import Publisher
from actors.fleet.snapshot import (
    Arrival,
    BitClass,
    EngineSnapshot,
    EngineState,
    Role,
    short_digests,
)
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.request import Request
from actors.scheduling.state import Fate, RequestStatus, prefix_digests
from app.simulate.run.replica import INFINITY, Replica

BITS = BitClass("simulated", "", "", "")  # all engines of a run are alike


class SimulatedEngine:
    """A simulated engine, and its front's counters for it."""

    __slots__ = (
        "balanced_s", "cached", "changed", "drain_s", "leaving_since_s", "name", "num_received",
        "publisher", "replica", "started_s", "state", "stays", "unseen_s",
    )  # fmt: skip

    def __init__(self, replica: Replica, started_s: float, role: Role = Role.BOTH) -> None:
        self.replica = replica
        self.name = f"engine-{replica.index}"
        self.publisher = Publisher(self.name, BITS, replica.core, role=role)
        self.state = EngineState.SERVING
        self.started_s = started_s
        self.cached: dict[int, int] = {}  # by request: its tokens that were cached as it came
        self.stays: Callable[[int], bool] = lambda request_id: False  # whether it cannot leave now
        self.num_received = 0
        self.drain_s = 0.0  # once it drains: streams that end so soon end here
        self.leaving_since_s = 0.0
        self.balanced_s = -INFINITY  # when its streams were last looked at
        self.changed = True  # since it was last looked at
        self.unseen_s: float | None = None  # then; None: the last snapshot shows it

    @property
    def accepts(self) -> bool:
        return self.state is EngineState.SERVING

    def snapshot(self, now_s: float, predict: bool) -> EngineSnapshot:
        self.changed, self.unseen_s = False, None
        return self.publisher.snapshot(now_s, self.state, self.num_received, predict)

    def streams(self) -> list[tuple[OpenStream, Request]]:
        """Its open streams, each with the request that would continue it on another engine."""
        live = self.replica.core.live_requests
        return [found for request_id in live if (found := self.stream(request_id)) is not None]

    def stream(self, request_id: int) -> tuple[OpenStream, Request] | None:
        """One of them; None: it has ended, or is not here."""
        core = self.replica.core
        state = core.live_requests.get(request_id)
        if state is None or (state.status is RequestStatus.FINISHING and state.fate is Fate.END):
            return None
        request = replace(state.request, output=tuple(state.output_token_ids))
        arrival = arrival_of(request, core.config)
        stream = OpenStream(
            request_id, self.name, arrival, BITS, bool(request.output), request.arrival_s,
            self.cached.get(request_id, 0),
        )  # fmt: skip
        return stream, request


def arrival_of(request: Request, config: SchedulerConfig) -> Arrival:
    """A request as routing sees it; delivered tokens count as known tokens."""
    prefix: tuple[bytes, ...] = ()
    tokens = (*request.prompt, *request.output) if request.output else request.prompt
    if config.prefix_cache:
        kept = tokens if config.num_saved_states is None else request.prompt[:-1]
        prefix = short_digests(prefix_digests(kept, config.block_size, request.cache_salt))
    left = request.sampling.max_tokens - len(request.output)
    return Arrival(len(tokens), left, request.objective, prefix, tenant=request.tenant)
