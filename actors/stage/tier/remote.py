"""Blocks of ranks on other nodes, by TCP: files of a share, as `disk` has them.

The answer to a question has, for each digest in order, the length of its file and the file, up to
the first that is not there, whose length is 0. What arrives is checked like a file that was read,
so that an answer which ends at any byte is a block that is absent.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Final

from actors.stage.tier.connections import (
    KnownPeers,
    PeerAddress,
    PeerServer,
    ask,
    next_question,
    read_exactly,
)

logger = logging.getLogger("legato.tier")

_LENGTH: Final = struct.Struct("<Q")


class ShareServer(PeerServer):
    """Serves the files of one folder."""

    def __init__(self, host: str, path_of: Callable[[bytes], Path]) -> None:
        """path_of: the file of a digest, which need not exist."""
        self._path_of = path_of
        super().__init__(host, self._answer_all)

    def _answer_all(self, sock: socket.socket) -> None:
        while True:
            for digest in next_question(sock):
                if not self._send_file(sock, digest):
                    break

    def _send_file(self, sock: socket.socket, digest: bytes) -> bool:
        try:
            file = self._path_of(digest).open("rb", buffering=0)
        except OSError:
            sock.sendall(_LENGTH.pack(0))
            return False
        with file:
            sock.sendall(_LENGTH.pack(os.fstat(file.fileno()).st_size))
            sock.sendfile(file)
        return True


class RemoteShares:
    """What the ranks of other nodes serve. Called by one thread, which waits for the network.

    file_bytes: length of a block's file; an answer of another length is none.
    """

    def __init__(self, peers: KnownPeers, file_bytes: int) -> None:
        self._peers = peers
        self._file_bytes = file_bytes
        self._sockets: dict[PeerAddress, socket.socket] = {}
        self._best: PeerAddress | None = None  # the last one that had something

    def load(self, digests: Sequence[bytes], deadline_s: float) -> Generator[bytearray, None, None]:
        """Files of these in this order, up to the first that no rank has or that is not here at
        `deadline_s` (by `time.monotonic`)."""
        num_found = 0
        for peer in sorted(self._peers.available(), key=lambda peer: peer != self._best):
            if num_found == len(digests) or time.monotonic() >= deadline_s:
                return
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
        sock = self._sockets.pop(peer, None) or self._peers.connect(peer, deadline_s)
        if sock is None:
            return
        is_silent = True  # nothing has come
        is_at_end = False  # of the answer: the connection can be used again
        try:
            sock.settimeout(max(0.001, deadline_s - time.monotonic()))
            ask(sock, digests)
            for left in range(len(digests) - 1, -1, -1):
                sock.settimeout(max(0.001, deadline_s - time.monotonic()))
                (length,) = _LENGTH.unpack(read_exactly(sock, _LENGTH.size))
                is_silent = False
                if length != self._file_bytes:
                    is_at_end = length == 0
                    return
                content = read_exactly(sock, length)
                is_at_end = left == 0
                yield content
        except OSError as error:
            logger.info("a block of %s:%d did not arrive: %s", peer.host, peer.port, error)
            if is_silent and isinstance(error, TimeoutError):
                self._peers.pause(peer)
        finally:
            if is_at_end:
                self._sockets[peer] = sock
            else:
                sock.close()
