"""Connections between ranks of different engines, by TCP, for whoever knows an address.

A connection begins with the secret of the rank that serves. A question is a count and that many
digests; what is answered is for `remote` and `direct` to say.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

logger = logging.getLogger("legato.tier")

SECRET_BYTES: Final = 32
COUNT: Final = struct.Struct("<I")
_DIGEST_BYTES: Final = 16
_MOST_ASKED: Final = 1 << 16
_SECRET_WITHIN_S: Final = 5.0
_ANSWER_WITHIN_S: Final = 30.0  # that a reader may stand still
_CONNECT_WITHIN_S: Final = 0.5
_PAUSE_S: Final = 30.0  # before a peer that did not answer is asked again


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a rank of another engine serves. host: a name or number."""

    host: str
    port: int
    secret: bytes


class PeerServer(socketserver.ThreadingTCPServer):
    """Serves whoever knows `address`. Raises OSError where it cannot listen. Its threads run beside
    the steps, and end with the process."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, host: str, serve: Callable[[socket.socket], None]) -> None:
        """serve: called with each connection, on a thread of its own; an OSError ends it."""
        self.serve = serve
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), _Connection)
        self.address = PeerAddress(host, self.server_address[1], secrets.token_bytes(SECRET_BYTES))
        self._thread = threading.Thread(target=self.serve_forever, name="legato-tier-serve")
        self._thread.daemon = True
        self._thread.start()

    def close(self) -> None:
        """Accept no more; connections go on to their ends."""
        self.shutdown()
        self.server_close()


class _Connection(socketserver.BaseRequestHandler):
    server: PeerServer
    request: socket.socket

    def handle(self) -> None:
        with suppress(OSError):  # steps come first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
        sock = self.request
        with suppress(OSError):  # the other end has gone, or stands still
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(_SECRET_WITHIN_S)
            secret = bytes(read_exactly(sock, SECRET_BYTES))
            if hmac.compare_digest(secret, self.server.address.secret):
                self.server.serve(sock)


class KnownPeers:
    """The ranks that can be asked. find: those known now. dropped: called with one at whose address
    nobody listens any more."""

    def __init__(
        self, find: Callable[[], Sequence[PeerAddress]], dropped: Callable[[PeerAddress], None]
    ) -> None:
        self._find = find
        self._dropped = dropped
        self._ask_again_s: dict[PeerAddress, float] = {}
        self._answered: set[PeerAddress] = set()  # when last asked

    def available(self) -> list[PeerAddress]:
        """Those that may be asked now; first those that answered, for each of the others may take
        the time that they need."""
        now_s = time.monotonic()
        may = [peer for peer in self._find() if now_s >= self._ask_again_s.get(peer, 0.0)]
        return sorted(may, key=lambda peer: peer not in self._answered)

    def pause(self, peer: PeerAddress) -> None:
        """Do not ask this one for a while."""
        self._answered.discard(peer)
        self._ask_again_s[peer] = time.monotonic() + _PAUSE_S

    def connect(self, peer: PeerAddress, deadline_s: float) -> socket.socket | None:
        """A new connection; None, and a pause, where there can be none before `deadline_s`."""
        within_s = min(_CONNECT_WITHIN_S, max(0.001, deadline_s - time.monotonic()))
        try:
            sock = socket.create_connection((peer.host, peer.port), within_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(peer.secret)
            self._answered.add(peer)
            return sock
        except ConnectionRefusedError:
            self._dropped(peer)
        except OSError as error:
            logger.info("%s:%d does not serve blocks: %s", peer.host, peer.port, error)
        self.pause(peer)
        return None


def ask(sock: socket.socket, digests: Sequence[bytes]) -> None:
    """Send a question."""
    sock.sendall(COUNT.pack(len(digests)) + b"".join(digests))


def next_question(sock: socket.socket) -> list[bytes]:
    """Wait for the digests that are asked next. Raises OSError at the end of the connection, also
    where it is to end because too much is asked. Then, the answer has to be read in time."""
    sock.settimeout(None)
    (count,) = COUNT.unpack(read_exactly(sock, COUNT.size))
    if count > _MOST_ASKED:
        raise ConnectionError(f"{count} blocks are asked for")
    sock.settimeout(_ANSWER_WITHIN_S)
    digests = bytes(read_exactly(sock, count * _DIGEST_BYTES))
    return [digests[at : at + _DIGEST_BYTES] for at in range(0, len(digests), _DIGEST_BYTES)]


def read_exactly(sock: socket.socket, count: int) -> bytearray:
    """This many bytes. Raises OSError at the end of the stream and after the timeout."""
    content = bytearray(count)
    view, at = memoryview(content), 0
    while at < count:
        received = sock.recv_into(view[at:])
        if not received:
            raise ConnectionError("closed")
        at += received
    return content
