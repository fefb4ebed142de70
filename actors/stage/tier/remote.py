"""Blocks of ranks on other nodes, by TCP: files of a share, as `disk` has them.

A connection begins with the secret of the rank that serves. A question is a count and that many
digests. The answer has, for each in order, the length of its file and the file, up to the first
that is not there, whose length is 0. What arrives is checked like a file that was read, so that an
answer which ends at any byte is a block that is absent.
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
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

logger = logging.getLogger("legato.tier")

SECRET_BYTES: Final = 32
_DIGEST_BYTES: Final = 16
_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")
_MOST_ASKED: Final = 1 << 16
_SECRET_WITHIN_S: Final = 5.0
_ANSWER_WITHIN_S: Final = 30.0  # that a reader may stand still
_CONNECT_WITHIN_S: Final = 0.5
_PAUSE_S: Final = 30.0  # before a peer that did not answer is asked again


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a rank of another node serves. host: a name or number."""

    host: str
    port: int
    secret: bytes


class ShareServer(socketserver.ThreadingTCPServer):
    """Serves the files of one folder to whoever knows `address`. Raises OSError where it cannot
    listen. Its threads read beside the steps, and end with the process."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, host: str, path_of: Callable[[bytes], Path]) -> None:
        """path_of: the file of a digest, which need not exist."""
        self.path_of = path_of
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
    server: ShareServer
    request: socket.socket

    def handle(self) -> None:
        with suppress(OSError):  # steps come first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
        sock = self.request
        with suppress(OSError):  # the other end has gone, or stands still
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(_SECRET_WITHIN_S)
            secret = bytes(_read(sock, SECRET_BYTES))
            if not hmac.compare_digest(secret, self.server.address.secret):
                return
            while True:
                sock.settimeout(None)
                (count,) = _COUNT.unpack(_read(sock, _COUNT.size))
                if count > _MOST_ASKED:
                    return
                sock.settimeout(_ANSWER_WITHIN_S)
                self._answer(bytes(_read(sock, count * _DIGEST_BYTES)))

    def _answer(self, digests: bytes) -> None:
        for at in range(0, len(digests), _DIGEST_BYTES):
            try:
                file = self.server.path_of(digests[at : at + _DIGEST_BYTES]).open("rb", buffering=0)
            except OSError:
                self.request.sendall(_LENGTH.pack(0))
                return
            with file:
                self.request.sendall(_LENGTH.pack(os.fstat(file.fileno()).st_size))
                self.request.sendfile(file)


class RemoteShares:
    """What the ranks of other nodes serve. Called by one thread, which waits for the network.

    find: the ranks known now. dropped: called with one at whose address nobody listens any more.
    file_bytes: length of a block's file; an answer of another length is none.
    """

    def __init__(
        self,
        find: Callable[[], Sequence[PeerAddress]],
        dropped: Callable[[PeerAddress], None],
        file_bytes: int,
    ) -> None:
        self._find = find
        self._dropped = dropped
        self._file_bytes = file_bytes
        self._sockets: dict[PeerAddress, socket.socket] = {}
        self._best: PeerAddress | None = None  # the last one that had something
        self._ask_again_s: dict[PeerAddress, float] = {}

    def load(self, digests: Sequence[bytes], deadline_s: float) -> Generator[bytearray, None, None]:
        """Files of these in this order, up to the first that no rank has or that is not here at
        `deadline_s` (by `time.monotonic`)."""
        num_found = 0
        for peer in sorted(self._find(), key=lambda peer: peer != self._best):
            now_s = time.monotonic()
            if num_found == len(digests) or now_s >= deadline_s:
                return
            if now_s < self._ask_again_s.get(peer, 0.0):
                continue
            for content in self._ask(peer, digests[num_found:], deadline_s):
                num_found += 1
                self._best = peer
                yield content

    def close(self) -> None:
        for sock in self._sockets.values():
            sock.close()
        self._sockets.clear()

    def _ask(
        self, peer: PeerAddress, digests: Sequence[bytes], deadline_s: float
    ) -> Iterator[bytearray]:
        sock = self._sockets.pop(peer, None) or self._connect(peer, deadline_s)
        if sock is None:
            return
        is_silent = True  # nothing has come
        is_at_end = False  # of the answer: the connection can be used again
        try:
            sock.settimeout(max(0.001, deadline_s - time.monotonic()))
            sock.sendall(_COUNT.pack(len(digests)) + b"".join(digests))
            for left in range(len(digests) - 1, -1, -1):
                sock.settimeout(max(0.001, deadline_s - time.monotonic()))
                (length,) = _LENGTH.unpack(_read(sock, _LENGTH.size))
                is_silent = False
                if length != self._file_bytes:
                    is_at_end = length == 0
                    return
                content = _read(sock, length)
                is_at_end = left == 0
                yield content
        except OSError as error:
            logger.info("a block of %s:%d did not arrive: %s", peer.host, peer.port, error)
            if is_silent and isinstance(error, TimeoutError):
                self._ask_again_s[peer] = time.monotonic() + _PAUSE_S
        finally:
            if is_at_end:
                self._sockets[peer] = sock
            else:
                sock.close()

    def _connect(self, peer: PeerAddress, deadline_s: float) -> socket.socket | None:
        within_s = min(_CONNECT_WITHIN_S, max(0.001, deadline_s - time.monotonic()))
        try:
            sock = socket.create_connection((peer.host, peer.port), within_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(peer.secret)
            return sock
        except ConnectionRefusedError:
            self._dropped(peer)
        except OSError as error:
            logger.info("%s:%d does not serve blocks: %s", peer.host, peer.port, error)
        self._ask_again_s[peer] = time.monotonic() + _PAUSE_S
        return None


def _read(sock: socket.socket, count: int) -> bytearray:
    """Exactly this many bytes. Raises OSError at the end of the stream and after the timeout."""
    content = bytearray(count)
    view, at = memoryview(content), 0
    while at < count:
        received = sock.recv_into(view[at:])
        if not received:
            raise ConnectionError("closed")
        at += received
    return content
