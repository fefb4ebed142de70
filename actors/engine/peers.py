"""The connections of a scheduler: the replica that owns it, and the fronts of its fleet.

When the owner's socket closes, the engine ends; fronts may connect and leave at any time. A
request's id contains the number of its connection, so outputs are routed without a table. A
message with an id of another connection is an error that closes its connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actors.fleet.snapshot import EngineSnapshot, PrefixUpdate
from actors.scheduling.events import DeliveryTook, FetchEarly, Refuse, TurnedAway
from actors.transport.addresses import is_local
from actors.transport.messages import (
    AbortRequests,
    Answer,
    Ask,
    Hello,
    IterationOutputs,
    KVSaved,
    Readiness,
    RequestsStarted,
    StandbyTaken,
    SubmitRequests,
    Suspects,
    Welcome,
    pack_kind,
    unpack_kind,
)
from actors.transport.wire import FrameProtocol, connect, listen

logger = logging.getLogger("legato.scheduler")

OWNER = 0
_IDS_PER_CONNECTION = 1 << 40
_MOST_UNSENT_BYTES = 64 << 20  # a front with more than this unread is disconnected
# Likewise one on another node that takes nothing for so long: its node has vanished (TCP by itself
# tries for a quarter hour), or its process stands still and the sockets' buffers are full.
_READ_WITHIN_S = 20.0
SAME_CLOCK_S = 0.5  # smaller offsets are of one machine, whose processes share a clock

Message = SubmitRequests | AbortRequests | Ask | FetchEarly | DeliveryTook | TurnedAway
OnMessage = Callable[[int, Message], None]  # of the connection with this number
OnGone = Callable[[int], None]


def first_id(connection: int) -> int:
    """The first id of a connection's range; connection 0 is the owner's."""
    return connection * _IDS_PER_CONNECTION


def connection_of(request_id: int) -> int:
    """The number of the connection that sent a request."""
    return request_id // _IDS_PER_CONNECTION


def clock_offset_s(now_s: float, address: str) -> float:
    """This process's clock minus that of another, which has sent its time, now_s, over a connection
    to this address. 0.0 within a node, however late a busy process has read the message; between
    nodes, that delay is in it until later times show it."""
    offset_s = time.monotonic() - now_s
    return 0.0 if is_local(address) or abs(offset_s) <= SAME_CLOCK_S else offset_s


@dataclass(frozen=True, slots=True)
class FrontAddress:
    """Where fronts connect: a local address, and a host for fronts on other nodes."""

    engine_id: str
    local: str
    host: str | None
    secret: bytes


class _Peer:
    """One connection, made to `address`. offset_s: the engine's clock minus its clock."""

    def __init__(self, number: int, address: str = "") -> None:
        self.number = number
        self.address = address
        self.num_received = 0
        self.offset_s: float | None = 0.0 if number == OWNER else None  # None before its hello
        self.socket: FrameProtocol | None = None


class Peers:
    """All connections of a scheduler. on_gone: called with the number of a closed connection."""

    def __init__(self, on_message: OnMessage, on_gone: OnGone) -> None:
        self._on_message = on_message
        self._on_gone = on_gone
        self._owner = _Peer(OWNER)
        self._fronts: dict[int, _Peer] = {}
        self._num_connections = 0
        self._servers: list[asyncio.Server] = []
        self._welcome: Callable[[int], Welcome] | None = None

    async def connect_owner(self, path: str) -> None:
        owner = self._owner
        owner.socket = await connect(
            path, lambda frame: self._received(owner, frame), lambda: self._on_gone(OWNER)
        )

    async def listen(self, fronts: FrontAddress, welcome: Callable[[int], Welcome]) -> str | None:
        """Let fronts connect; returns the TCP address, if there is one."""
        self._welcome = welcome
        server, _ = await listen(fronts.local, lambda: self._accept(fronts, fronts.local))
        self._servers.append(server)
        if fronts.host is None:
            return None
        free = f"{fronts.host}:0"
        server, address = await listen(free, lambda: self._accept(fronts, free))
        self._servers.append(server)
        return address

    def close_fronts(self) -> None:
        """Let none connect any more, and hang up on those that have: the engine ends."""
        self._welcome = None
        for server in self._servers:
            server.close()
        fronts, self._fronts = self._fronts, {}  # none of them is told of as gone
        for peer in fronts.values():
            if peer.socket is not None:
                peer.socket.abort()

    @property
    def num_fronts(self) -> int:
        return len(self._fronts)

    def knows(self, request_id: int) -> bool:
        """Whether the connection that sent this request is still open."""
        number = connection_of(request_id)
        return number == OWNER or number in self._fronts

    # ---- receiving -------------------------------------------------------------------------

    def _accept(self, fronts: FrontAddress, address: str) -> FrameProtocol:
        self._num_connections += 1
        peer = _Peer(self._num_connections, address)
        peer.socket = FrameProtocol(
            lambda frame: self._received(peer, frame), lambda: self._left(peer), fronts.secret,
            _READ_WITHIN_S,
        )  # fmt: skip
        return peer.socket

    def _left(self, peer: _Peer) -> None:
        if self._fronts.pop(peer.number, None) is not None:
            self._on_gone(peer.number)

    def _received(self, peer: _Peer, frame: bytes) -> None:
        message = unpack_kind(frame)
        if isinstance(message, Hello):
            self._greet(peer, message)
        elif peer.offset_s is None or not _is_own(peer, message):
            self._close(peer, "unexpected message")
        else:
            if isinstance(message, SubmitRequests):
                peer.num_received += len(message.requests)
                if peer.offset_s:
                    message = _on_this_clock(message, peer, peer.offset_s)
            self._on_message(peer.number, message)

    def _greet(self, peer: _Peer, hello: Hello) -> None:
        if self._welcome is None or peer.offset_s is not None:
            self._close(peer, "an unexpected hello")
            return
        peer.offset_s = clock_offset_s(hello.now_s, peer.address)
        self._fronts[peer.number] = peer
        self._send(peer, self._welcome(peer.number))

    def _close(self, peer: _Peer, why: str) -> None:
        logger.error("connection %d is closed: %s", peer.number, why)
        if peer.socket is not None:
            peer.socket.abort()  # one that does not read would not let `close` end

    # ---- sending ---------------------------------------------------------------------------

    def send_outputs(self, rows: Sequence[tuple[Any, ...]], records: Sequence[Any]) -> None:
        """One message to each connection that has tokens in this iteration; records go to all."""
        now_s = time.monotonic()
        if not self._fronts:
            self._send(self._owner, IterationOutputs(tuple(rows), tuple(records), now_s))
            return
        shares: dict[int, list[tuple[Any, ...]]] = {}
        for row in rows:
            shares.setdefault(connection_of(row[0]), []).append(row)
        for peer in (self._owner, *self._fronts.values()):
            share = shares.get(peer.number)
            if share or records:
                self._send(peer, IterationOutputs(tuple(share or ()), tuple(records), now_s))

    def send_started(self, request_ids: Sequence[int]) -> None:
        if not self._fronts:
            self._send(self._owner, RequestsStarted(tuple(request_ids)))
            return
        shares: dict[int, list[int]] = {}
        for request_id in request_ids:
            shares.setdefault(connection_of(request_id), []).append(request_id)
        for number, share in shares.items():
            self.send(number, RequestsStarted(tuple(share)))

    def send_refusal(self, refusal: Refuse) -> None:
        self.send(connection_of(refusal.request_id), refusal)

    def send_saved(self, saved: KVSaved) -> None:
        self.send(connection_of(saved.request_id), saved)

    def broadcast(self, message: Readiness | Suspects | PrefixUpdate) -> None:
        for peer in (self._owner, *self._fronts.values()):
            if peer.number != OWNER or not isinstance(message, PrefixUpdate):
                self._send(peer, message)

    def publish(self, snapshot: EngineSnapshot, to: int | None = None) -> None:
        """Send to all connections, the owner included, or to one front."""
        if to is None:
            self._send(self._owner, snapshot)
        for peer in list(self._fronts.values()):
            if peer.socket is not None and peer.socket.num_unsent_bytes > _MOST_UNSENT_BYTES:
                self._close(peer, "it does not read")
            elif to in (None, peer.number):
                self._send(peer, replace(snapshot, num_received=peer.num_received))

    def send(
        self,
        number: int,
        message: RequestsStarted | Refuse | Answer | PrefixUpdate | StandbyTaken | KVSaved,
    ) -> None:
        peer = self._owner if number == OWNER else self._fronts.get(number)
        if peer is not None:
            self._send(peer, message)

    @staticmethod
    def _send(peer: _Peer, message: Any) -> None:
        if peer.socket is not None:
            peer.socket.send(pack_kind(message))


def _is_own(peer: _Peer, message: Any) -> bool:
    """Whether this peer may send the message: it concerns only the peer's own requests."""
    if isinstance(message, SubmitRequests):
        return all(connection_of(r.request_id) == peer.number for r in message.requests)
    if isinstance(message, AbortRequests):
        return all(connection_of(i) == peer.number for i in message.request_ids)
    return isinstance(message, Ask | FetchEarly | DeliveryTook | TurnedAway)


def _on_this_clock(message: SubmitRequests, peer: _Peer, offset_s: float) -> SubmitRequests:
    # None arrives in the future: what seems to shows how late the hello was read, at least.
    now_s = time.monotonic()
    offset_s = peer.offset_s = min([offset_s, *[now_s - r.arrival_s for r in message.requests]])
    return SubmitRequests(
        tuple([replace(r, arrival_s=r.arrival_s + offset_s) for r in message.requests])
    )
