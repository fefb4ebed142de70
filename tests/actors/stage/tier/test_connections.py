"""Who asks a rank for blocks: nobody without its secret, and nobody who asks for too many."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from actors.stage.tier.connections import (
    SECRET_BYTES,
    KnownPeers,
    PeerAddress,
    PeerServer,
    ask,
    next_question,
)
from tests.actors.stage.tier.test_shared import digest

HOST = "127.0.0.1"
LIMIT_S = 30.0


def echo(sock: socket.socket) -> None:
    """Answer questions by what was asked."""
    while True:
        sock.sendall(b"".join(next_question(sock)))


@pytest.fixture
def server() -> Iterator[PeerServer]:
    served = PeerServer(HOST, echo)
    yield served
    served.close()


def connected(address: PeerAddress) -> socket.socket:
    sock = KnownPeers(lambda: [address], lambda _: None).connect(
        address, time.monotonic() + LIMIT_S
    )
    assert sock is not None
    sock.settimeout(LIMIT_S)
    return sock


def is_hung_up(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_questions_arrive_one_after_the_other(server: PeerServer) -> None:
    with connected(server.address) as sock:
        for numbers in ((1, 2, 3), (), (4,)):
            asked = [digest(n) for n in numbers]
            ask(sock, asked)
            answer = sock.recv(16 * len(asked), socket.MSG_WAITALL) if asked else b""
            assert answer == b"".join(asked)


def test_nothing_is_served_without_the_secret(server: PeerServer) -> None:
    with connected(replace(server.address, secret=bytes(SECRET_BYTES))) as sock:
        ask(sock, [digest(1)])
        assert is_hung_up(sock)


def test_who_asks_for_too_much_is_hung_up(server: PeerServer) -> None:
    with connected(server.address) as sock:
        sock.sendall(struct.pack("<I", 1 << 31))
        assert is_hung_up(sock)


def test_those_that_answered_are_asked_first(server: PeerServer) -> None:
    """A machine that is gone takes half a second of each fetch that asks it first."""
    with socket.create_server((HOST, 0)) as listener:
        unknown = [PeerAddress(HOST, listener.getsockname()[1], bytes([n])) for n in range(2)]
    peers = KnownPeers(lambda: [unknown[0], server.address, unknown[1]], lambda _: None)
    assert peers.available() == [unknown[0], server.address, unknown[1]]
    sock = peers.connect(server.address, time.monotonic() + LIMIT_S)
    assert sock is not None
    sock.close()
    assert peers.available() == [server.address, *unknown]


def test_a_peer_that_fell_silent_is_not_asked_first(
    server: PeerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.stage.tier.connections._PAUSE_S", 0.0)
    unknown = replace(server.address, secret=b"x")
    peers = KnownPeers(lambda: [unknown, server.address], lambda _: None)
    sock = peers.connect(server.address, time.monotonic() + LIMIT_S)
    assert sock is not None
    sock.close()
    assert peers.available() == [server.address, unknown]
    peers.pause(server.address)
    assert peers.available() == [unknown, server.address]


def test_a_dead_peer_is_dropped_and_left_alone_for_a_while() -> None:
    with socket.create_server((HOST, 0)) as listener:
        dead = PeerAddress(HOST, listener.getsockname()[1], b"")
    dropped: list[PeerAddress] = []
    peers = KnownPeers(lambda: [dead], dropped.append)
    assert peers.available() == [dead]
    assert peers.connect(dead, time.monotonic() + LIMIT_S) is None
    assert dropped == [dead]
    assert peers.available() == []
