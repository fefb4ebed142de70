"""Framed messages over stream sockets, between the processes of one engine.

A frame is a little-endian uint32 length and that many bytes. Payloads are msgpack or empty, never
pickle. On one node sockets are Unix ones in a private 0700 directory, unlinked as soon as they are
connected. If several may connect, or connect again, the address is "@name", an abstract socket of
this node, which leaves no file behind. Between nodes sockets are TCP, "host:port". Connections to
both of these must begin with the engine's secret, or are closed unread.

Why sockets beside Ray's channels: a process that waits in a compiled graph's channel spins, which
takes a core from the stages. A read on a socket sleeps (measured: 0.01 s of CPU in an
idle second for scheduler and stage together, 0.35 ms for a whole empty step).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import select
import socket
import struct
from collections.abc import Callable
from functools import partial
from typing import Final, cast

from actors.transport.addresses import SECRET_BYTES, host_and_port, is_local, is_path

logger = logging.getLogger("legato.transport")

_LENGTH = struct.Struct("<I")
_TURN_BYTES: Final = 1 << 15  # of frames: some milliseconds of log-probabilities, or 500 steps
MAX_FRAME_BYTES = 1 << 30  # a frame with a greater length closes the connection
_SECRET_WAIT_S = 5.0  # a connection must send the secret within this time


class ConnectionLost(Exception):
    """The other end has closed the connection."""


class Mailbox:
    """The blocking receiving end: one listener, one peer, frames read in order."""

    def __init__(self, address: str, secret: bytes = b"") -> None:
        """address: a path, or "host:0" for a free port of that host.
        secret: what a connection by TCP must begin with."""
        self._secret = secret
        if is_path(address):
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(address)
            self._listener.listen(1)
            self.address = address
        else:
            host, port = host_and_port(address)
            self._listener = socket.create_server((host, port))
            self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._peer: socket.socket | None = None
        self._peeked: bytes | None = None

    def peek(self, wait_s: float = 0.0) -> bytes | None:
        """The frame that `receive` will return next if it comes within wait_s."""
        if self._peeked is None and self._peer is not None:
            readable, _, _ = select.select([self._peer], [], [], wait_s)
            if readable:
                with contextlib.suppress(ConnectionLost):  # `receive` will raise it
                    self._peeked = self.receive()
        return self._peeked

    def receive(self) -> bytes:
        """Sleep until a frame is there. Raises ConnectionLost when the peer has closed."""
        if self._peeked is not None:
            frame, self._peeked = self._peeked, None
            return frame
        if self._peer is None:
            self._peer = self._accept()
            self._listener.close()
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise ConnectionLost(f"a frame of {length} bytes")
        return self._read(length)

    def _accept(self) -> socket.socket:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError as error:
                raise ConnectionLost(self.address) from error
            if is_path(self.address):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.address)
                return peer
            peer.settimeout(_SECRET_WAIT_S)
            with contextlib.suppress(OSError):
                received = b""
                while (left := SECRET_BYTES - len(received)) and (more := peer.recv(left)):
                    received += more
                if hmac.compare_digest(received, self._secret):
                    peer.settimeout(None)
                    return peer
            peer.close()

    def _read(self, count: int) -> bytes:
        assert self._peer is not None
        try:
            data = self._peer.recv(count, socket.MSG_WAITALL)
            if len(data) == count:
                return data
            parts = bytearray(data)
            while len(parts) < count:
                data = self._peer.recv(count - len(parts), socket.MSG_WAITALL)
                if not data:
                    raise ConnectionLost(self.address)
                parts += data
            return bytes(parts)
        except OSError as error:
            raise ConnectionLost(self.address) from error

    def close(self) -> None:
        for sock in (self._peer, self._listener):
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                sock.close()


class Sender:
    """The blocking sending end, for stage processes."""

    def __init__(self, address: str, secret: bytes = b"") -> None:
        if is_path(address):
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._sock.connect(address)
        else:
            self._sock = socket.create_connection(host_and_port(address))
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sock.sendall(secret)

    def send(self, payload: bytes = b"") -> None:
        try:
            self._sock.sendall(_LENGTH.pack(len(payload)) + payload)
        except OSError as error:
            raise ConnectionLost("peer closed") from error

    def close(self) -> None:
        self._sock.close()


class FrameProtocol(asyncio.Protocol):
    """The event-loop end: calls `on_frame` for each frame and `on_lost` once at the end.

    If a peer sends faster than its frames are handled, only some are read at a time, so that
    other work on the loop is not delayed; the peer keeps the rest.
    """

    def __init__(
        self,
        on_frame: Callable[[bytes], None],
        on_lost: Callable[[], None],
        secret: bytes = b"",
        read_within_s: float | None = None,
    ) -> None:
        """secret: the other end must send it before its first frame; otherwise the connection is
        closed, without `on_lost`. read_within_s: a TCP peer that takes nothing so long is lost."""
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._secret = secret
        self._read_within_s = read_within_s
        self._buffer = bytearray()
        self._turn_bytes = 0  # handled since the loop last had a turn for others
        self._transport: asyncio.Transport | None = None
        self._silence: asyncio.TimerHandle | None = None  # ends a connection without the secret

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        sock, option = transport.get_extra_info("socket"), getattr(socket, "TCP_USER_TIMEOUT", None)
        if self._read_within_s and sock.family != socket.AF_UNIX and option:  # Linux has it
            sock.setsockopt(socket.IPPROTO_TCP, option, round(1000 * self._read_within_s))
        if self._secret:
            loop = asyncio.get_running_loop()
            self._silence = loop.call_later(_SECRET_WAIT_S, transport.close)

    def data_received(self, data: bytes) -> None:
        buffer, rest = self._buffer, len(data) - _LENGTH.size
        if not (buffer or self._secret or rest < 0) and _LENGTH.unpack_from(data)[0] == rest:
            self._on_frame(data[_LENGTH.size :])  # one whole frame, as nearly always
            self._turn_bytes += rest
            if self._turn_bytes > _TURN_BYTES:
                self._rest()
            return
        buffer += data
        if self._secret:
            self._read_secret()
        if not self._secret:
            self._handle_frames()

    def _read_secret(self) -> None:
        """Check the secret at the start of a connection; close it if the secret is wrong."""
        buffer, secret = self._buffer, self._secret
        if len(buffer) < len(secret):
            return
        if not hmac.compare_digest(bytes(buffer[: len(secret)]), secret):
            self.abort()
            return
        del buffer[: len(secret)]
        self._secret = b""
        if self._silence is not None:
            self._silence.cancel()

    def _handle_frames(self) -> None:
        """Handle complete frames, up to the limit of this turn."""
        buffer, offset = self._buffer, 0
        while len(buffer) - offset >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, offset)
            if length > MAX_FRAME_BYTES:
                self.abort()
                return
            end = offset + _LENGTH.size + length
            if len(buffer) < end:
                break
            if self._turn_bytes > _TURN_BYTES:
                self._rest()
                break
            self._turn_bytes += length
            frame = bytes(buffer[offset + _LENGTH.size : end])
            offset = end
            self._on_frame(frame)
        del buffer[:offset]

    def _rest(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._turn_bytes = 0
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
            try:
                self._handle_frames()
            except Exception as error:  # in `data_received` the loop would end the connection
                logger.error("a frame could not be handled", exc_info=error)
                self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._silence is not None:
            self._silence.cancel()
        if exc is not None and not isinstance(exc, OSError):  # raised by `on_frame`
            logger.error("a frame could not be handled", exc_info=exc)
        if not self._secret:
            self._on_lost()

    def send(self, payload: bytes = b"") -> None:
        """Queue a frame; the loop writes it. Dropped once the peer has closed the connection, which
        `on_lost` has reported."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(_LENGTH.pack(len(payload)) + payload)

    @property
    def num_unsent_bytes(self) -> int:
        """Queued here because the peer does not read them."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def close(self) -> None:
        """End the connection once the peer has read everything, which may be never."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the connection at once, and drop what is unsent or not yet handled."""
        self._buffer.clear()
        if self._transport is not None:
            self._transport.abort()


async def connect(
    address: str,
    on_frame: Callable[[bytes], None],
    on_lost: Callable[[], None],
    secret: bytes = b"",
) -> FrameProtocol:
    """Connect from an event loop to a Mailbox or to `listen`. Raises OSError."""
    loop, make = asyncio.get_running_loop(), partial(FrameProtocol, on_frame, on_lost)
    if is_path(address):
        _, protocol = await loop.create_unix_connection(make, address)
    elif is_local(address):
        with contextlib.ExitStack() as unless_connected:
            sock = unless_connected.enter_context(socket.socket(socket.AF_UNIX))
            sock.setblocking(False)
            sock.connect(f"\0{address[1:]}")  # at once, or refused
            transport, protocol = await loop.create_unix_connection(make, sock=sock)
            unless_connected.pop_all()
        transport.write(secret)
    else:
        transport, protocol = await loop.create_connection(make, *host_and_port(address))
        transport.write(secret)
    return protocol


async def listen(
    address: str, make_protocol: Callable[[], FrameProtocol]
) -> tuple[asyncio.Server, str]:
    """Accept connections from an event loop; address as for Mailbox. Returns the server and
    where it listens. Except for a path, protocols must have a secret."""
    loop = asyncio.get_running_loop()
    if is_path(address):
        return await loop.create_unix_server(make_protocol, address), address
    if is_local(address):
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(f"\0{address[1:]}")
        return await loop.create_unix_server(make_protocol, sock=sock), address
    host, port = host_and_port(address)
    server = await loop.create_server(make_protocol, host, port)
    return server, f"{host}:{server.sockets[0].getsockname()[1]}"
