"""Drops clients that have stopped reading their answers.

ASGI does not report such clients, and closing a connection waits for its buffer. So connections
with an answer under way, or not yet taken, are checked once a second: the buffers of the process
and of the system must have shrunk.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import sys
import termios
from dataclasses import dataclass
from typing import Any, Final

_CHECK_EVERY_S: Final = 1.0
_HELD_BACK_BYTES: Final = 1 << 16  # with more, a server waits before it writes again


@dataclass(slots=True)
class _Connection:
    """num_bytes: in its buffers at the last check. since_s: the last time it may have shrunk."""

    since_s: float
    num_answers: int = 0  # under way
    num_bytes: int = 0


class StalledClients:
    """Connections of one replica; aborts one that takes nothing for timeout_s."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._connections: dict[Any, _Connection] = {}
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, transport: Any) -> None:
        """An answer begins on this connection."""
        loop = asyncio.get_running_loop()
        found = self._connections.get(transport)
        if found is None:
            found = self._connections[transport] = _Connection(loop.time())
        found.num_answers += 1
        if self._timer is None:
            self._wait(loop)

    def leave(self, transport: Any) -> None:
        """The answer has ended; the part of it that is still in the buffer is watched."""
        found = self._connections.get(transport)
        if found is not None:
            found.num_answers -= 1

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        delay_s = min(_CHECK_EVERY_S, self._timeout_s)
        self._timer = loop.call_later(delay_s, self._check, loop) if self._connections else None

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s = loop.time()
        for transport, found in list(self._connections.items()):
            num_held = transport.get_write_buffer_size()
            if num_held == 0 and (found.num_answers <= 0 or transport.is_closing()):
                del self._connections[transport]
                continue
            num_bytes = num_held + _in_kernel(transport) if num_held else 0
            # While it grows from little it may shrink as well: a stream goes on.
            grows = num_bytes > found.num_bytes and num_held < _HELD_BACK_BYTES
            if num_bytes < found.num_bytes or grows or found.num_bytes == 0:
                found.since_s = now_s
            elif now_s - found.since_s >= self._timeout_s:
                del self._connections[transport]
                _reset(transport)
            found.num_bytes = num_bytes
        self._wait(loop)


def _in_kernel(transport: Any) -> int:
    """Bytes that the system holds because the client's has not acknowledged them: they become fewer
    even while a slow reader leaves no room for more."""
    connection = transport.get_extra_info("socket")
    if connection is None:
        return 0
    try:
        answer = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
    except OSError:  # closed by now, or a system without this call
        return 0
    return int.from_bytes(answer, sys.byteorder)


def _reset(transport: Any) -> None:
    """Close without waiting: else the kernel keeps the bytes that were not taken, and with them the
    connection."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
