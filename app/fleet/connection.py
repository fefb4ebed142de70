"""A front's connection to one engine, and its streams on that engine."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from weakref import WeakValueDictionary

from actors.engine.peers import clock_offset_s, first_id
from actors.fleet.snapshot import BitClass, EngineSnapshot, EngineState, PrefixUpdate
from actors.scheduling.events import Output, Refuse
from actors.scheduling.request import FinishReason, Request
from actors.transport.messages import Hello, IterationRecord, KVSaved, Readiness, Welcome
from actors.transport.running_time import RunningTime, running_timeout
from actors.transport.wire import connect
from app.engine_client.channel import EngineMessage, SchedulerChannel
from app.engine_client.client import GenerationRequest
from app.engine_client.streams import OpenRequest, OpenRequests, Stream, core_requests
from app.fleet.registry import EngineEntry

_CONNECT_WITHIN_S = 5.0


@dataclass(slots=True, eq=False, weakref_slot=True)
class FleetRequest(OpenRequest):
    """One continuation; it may change engines.

    connection: to the engine that computes it; None: no engine does. last_engine_id: that engine,
    or the last one. bits_here: the class of that engine; bits_before: of the one that computed its
    tokens before. refused_by: engines that refused it, the last one last.
    placed_s: when it was sent to its engine.
    waiting_since_s: it has had no token since then, plus the time that it spent at engines.
    last_move: as shown in the fleet's status.
    num_cached_tokens: of it, that its engine had when it was sent there.
    receiver_id: the engine that fetches its KV while another computes it; "": none does.
    """

    connection: Connection | None = None
    last_engine_id: str = ""
    bits_here: BitClass | None = None
    bits_before: BitClass | None = None
    refused_by: dict[str, Refuse] = field(default_factory=dict)
    waiting_since_s: float = 0.0
    placed_s: float = 0.0
    num_cached_tokens: int = 0
    num_moves: int = 0
    last_move: dict[str, Any] | None = None
    num_delivered_before: int = 0  # tokens, before it was sent to its engine
    placed: Callable[[int, str], None] | None = None  # called with `index` and the engine
    # If its engine only computes the prompt and the first token: called once that is delivered.
    hand_over: Callable[[FleetRequest], None] | None = None
    # Called with the digests of its blocks that are saved there, as they are saved.
    kv_saved: Callable[[FleetRequest, Sequence[bytes]], None] | None = None
    receiver_id: str = ""
    adapter: tuple[int, str] | None = None  # as in `Arrival`
    prefix: tuple[int, tuple[bytes, ...]] | None = None  # block size, short digests of the prompt

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and delivered tokens."""
        return len(self.request.prompt) + self.base + len(self.delivered)

    @property
    def bits(self) -> BitClass | None:
        """Class of the engine that computed its last token, or is to compute its first."""
        num_before = self.num_delivered_before
        is_here = num_before == 0 or len(self.delivered) > num_before
        return self.bits_here if is_here else self.bits_before

    def place(self, connection: Connection) -> None:
        """Assign it to this engine. What another has accepted is judged by no limit again."""
        if self.last_engine_id and self.last_engine_id not in self.refused_by:
            begun = self.has_started or self.request.has_started
            self.request = replace(self.request, is_replayed=True, has_started=begun)
        now_s = time.monotonic()
        if self.connection is not None:
            self.unplace(now_s)
        self.placed_s = now_s
        self.connection, self.last_engine_id = connection, connection.engine_id
        self.has_started = False
        self.bits_before = self.bits
        self.num_delivered_before = len(self.delivered)
        if connection.snapshot is not None:
            self.bits_here = connection.snapshot.bits
        if self.placed is not None:
            self.placed(self.index, connection.engine_id)

    def unplace(self, now_s: float) -> None:
        """Take it from its engine. Its wait counts from now if that engine sent a token, and else
        goes on: the time there, in a queue, was none."""
        self.connection = None
        self.forget_load()
        if len(self.delivered) > self.num_delivered_before:
            self.waiting_since_s = now_s
        else:
            self.waiting_since_s += now_s - self.placed_s

    def forget_load(self) -> None:
        """It leaves its engine. If that has accepted it, others that were too busy for it may take
        it now: what was accepted is judged by no such limit again."""
        if self.last_engine_id not in self.refused_by:
            kept = {name: r for name, r in self.refused_by.items() if r.retry_after_s is None}
            self.refused_by = kept

    def resumed(self) -> Request:
        request = OpenRequest.resumed(self)
        if self.hand_over is not None:
            return replace(request, sampling=replace(request.sampling, max_tokens=1))
        if self.has_tokens and request.sampling.prompt_logprobs is not None:
            # They came with the first token; to compute them again, no cached block could be used.
            return replace(request, sampling=replace(request.sampling, prompt_logprobs=None))
        return request

    def deliver(self, output: Output) -> None:
        """See `OpenRequest.deliver`; the end of an engine's part is not the end of the stream."""
        is_part = self.hand_over is not None and output.finish_reason is FinishReason.LENGTH
        OpenRequest.deliver(self, output._replace(finish_reason=None) if is_part else output)
        if is_part and self.hand_over is not None:
            self.hand_over(self)

    @property
    def has_tokens(self) -> bool:
        return bool(self.delivered)


def fleet_requests_of(
    request: GenerationRequest, stream: Stream, now_s: float, adapters: Mapping[int, str]
) -> list[FleetRequest]:
    """Its continuations. adapters: by slot, as in `EngineSnapshot.adapters`."""
    slot = request.adapter - 1
    adapter = None if slot < 0 else (slot, adapters[slot])
    return [
        FleetRequest(
            core_request, index, stream,
            waiting_since_s=now_s, placed=request.placed, adapter=adapter,
        )
        for index, core_request in enumerate(core_requests(request, itertools.count(), now_s))
    ]  # fmt: skip


class Owner(Protocol):
    """What a front does with what its connections say; implemented by `app.fleet.client`."""

    def published(self, connection: Connection, snapshot: EngineSnapshot) -> None: ...
    def prefixes_updated(self, update: PrefixUpdate) -> None: ...
    def refused(self, connection: Connection, refusal: Refuse) -> None: ...
    def iterated(self, connection: Connection, records: Sequence[Any]) -> None: ...
    def lost(self, connection: Connection) -> None: ...


class Connection(SchedulerChannel):
    """A front's connection to one engine, and the `ChannelOwner` of its socket.
    `open_requests` holds the streams on that engine."""

    def __init__(self, entry: EngineEntry, node: str, front: Owner) -> None:
        super().__init__(OpenRequests(), self)
        self.engine_id = entry.engine_id
        self.welcome: Welcome | None = None
        self.snapshot: EngineSnapshot | None = None
        self.entry = entry
        self._address = entry.local if entry.node == node else entry.tcp
        self._front = front
        self.offset_s = 0.0  # the engine's clock minus this front's
        self.leaving_since_s: float | None = None  # it drains
        self._published_s = time.monotonic()  # before its first snapshot: since when one is due
        self._silence = RunningTime()
        self.balanced_s = 0.0  # when streams were last moved to balance the load
        self.is_ready = True  # False while its stages are rebuilt
        self._ids = itertools.count(1)
        self._welcomed: asyncio.Future[None] | None = None
        # Those whose prompts this engine computes for others; an entry goes with its stream.
        self._begun: WeakValueDictionary[int, FleetRequest] = WeakValueDictionary()

    @property
    def was_leaving(self) -> bool:
        """Whether it has published that it drains."""
        return self.leaving_since_s is not None

    @property
    def fleet_requests(self) -> list[FleetRequest]:
        """The continuations on this engine."""
        return [r for r in self.open_requests.values() if isinstance(r, FleetRequest)]

    async def connect(self) -> None:
        """Raises OSError or TimeoutError where the engine cannot be reached."""
        if self._address is None:
            raise OSError(f"{self.engine_id} is on another node and listens on its own node only")
        self._welcomed = asyncio.get_running_loop().create_future()
        try:
            async with running_timeout(_CONNECT_WITHIN_S):
                self._socket = await connect(
                    self._address, self._received, self._lost, self.entry.secret
                )
                self._send(Hello(time.monotonic()))
                await self._welcomed
        except TimeoutError:
            # The welcome may have come in the turn of the loop in which the limit passed; a
            # snapshot behind it has made the engine known, and nothing would take that back.
            if self.welcome is None or not self.is_open:
                raise

    def _lost(self) -> None:
        if self._welcomed is not None and not self._welcomed.done():
            self._socket = None
            self._welcomed.set_exception(
                ConnectionError(f"{self.engine_id} refused the connection")
            )
            return
        super()._lost()

    def silent_s(self, now_s: float, period_s: float) -> float:
        """For how long it has published nothing, of the time in which this front ran. Asked once
        per period once it is connected."""
        return self._silence.since(self._published_s, now_s, period_s)

    def on_records(self, records: Sequence[Any]) -> None:
        self._front.iterated(self, records)

    def on_refusal(self, refusal: Refuse) -> None:
        self._front.refused(self, refusal)

    def on_lost(self) -> None:
        self._front.lost(self)

    def on_message(self, message: EngineMessage) -> None:
        if isinstance(message, EngineSnapshot):
            self.snapshot, self._published_s = message, time.monotonic()
            if self.leaving_since_s is None and message.state is EngineState.DRAINING:
                self.leaving_since_s = time.monotonic()
            self._front.published(self, message)
        elif isinstance(message, Readiness):
            self.is_ready = message.is_ready
        elif isinstance(message, PrefixUpdate):
            self._front.prefixes_updated(message)
        elif isinstance(message, KVSaved):
            begun = self._begun.get(message.request_id)
            is_here = begun is not None and begun.last_engine_id == self.engine_id
            if begun is not None and is_here and begun.kv_saved is not None:
                begun.kv_saved(begun, message.digests)
        elif isinstance(message, Welcome) and self._welcomed is not None:
            self.welcome = message
            self.offset_s = -clock_offset_s(message.now_s, self._address or "")
            self._ids = itertools.count(first_id(message.number) + 1)
            if not self._welcomed.done():
                self._welcomed.set_result(None)

    def shifted(self, records: Sequence[Any]) -> Sequence[Any]:
        """Rows of `IterationRecord`, in times of this front's clock."""
        if not self.offset_s:
            return records
        now_s, known = time.monotonic(), [IterationRecord(*row) for row in records]
        # None has ended in the future: what seems to shows how late the welcome was read, at least.
        offset_s = self.offset_s = max([self.offset_s, *[each.done_s - now_s for each in known]])
        shifted = []
        for record in known:
            stages_s = tuple([(a - offset_s, b - offset_s) for a, b in record.stages_s])
            begin_s, end_s = record.submitted_s - offset_s, record.done_s - offset_s
            shifted.append(record._replace(stages_s=stages_s, submitted_s=begin_s, done_s=end_s))
        return shifted

    def submit_continuations(self, fleet_requests: Sequence[FleetRequest]) -> None:
        """Submit them here. Raises TypeError, ValueError or OverflowError for values that cannot be
        encoded; none is open here then."""
        requests = []
        for fleet_request in fleet_requests:
            request_id = next(self._ids)
            fleet_request.rename(request_id)
            fleet_request.place(self)
            self.open_requests[request_id] = fleet_request
            if fleet_request.hand_over is not None:
                self._begun[request_id] = fleet_request
            requests.append(fleet_request.resumed())
        try:
            self.submit(requests)
        except (TypeError, ValueError, OverflowError):
            for fleet_request in fleet_requests:
                self.open_requests.pop(fleet_request.request.request_id, None)
                fleet_request.connection = None
            raise

    def abort_continuations(self, fleet_requests: Sequence[OpenRequest]) -> None:
        """Abort those of them that are open here."""
        ids = [r.request.request_id for r in fleet_requests]
        left = [i for i in ids if self.open_requests.pop(i, None) is not None]
        if left:
            self.abort(left)

    def computes(self, fleet_request: FleetRequest) -> bool:
        """Whether it is open here."""
        return self.open_requests.get(fleet_request.request.request_id) is fleet_request

    def cut(self) -> None:
        """Treat the engine as dead."""
        socket = self._socket
        if socket is not None:
            self._lost()
            socket.close()

    def close(self) -> None:
        """Close without calling the owner."""
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close()
