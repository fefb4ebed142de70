"""Blocks of another node by TCP: whole, right and in time, or absent."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.stage.tier.connections import SECRET_BYTES, KnownPeers, PeerAddress
from actors.stage.tier.remote import RemoteShares, ShareServer
from actors.stage.tier.shared import SharedTier
from actors.stage.tier.store import BlockStore
from tests.actors.stage.tier.test_shared import SIZE, block, digest

HOST = "127.0.0.1"
FILE_BYTES = SIZE + 60
LIMIT_S = 30.0


class Node:
    """A share, and what serves it."""

    def __init__(self, folder: Path, *numbers: int) -> None:
        self.tier = SharedTier(folder / "m/rank", "model", SIZE, 1 << 20)
        for number in numbers:
            self.tier.put(digest(number), block(number))
        self.server = ShareServer(HOST, self.tier.path)

    def end(self) -> None:
        self.server.close()
        self.tier.close()


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(*numbers: int) -> Node:
        made.append(Node(tmp_path / f"node-{len(made)}", *numbers))
        return made[-1]

    yield make
    for node in made:
        node.end()


class Reader:
    """The shares of these ranks, and which of them were found dead."""

    def __init__(self, *peers: PeerAddress) -> None:
        self.peers = list(peers)
        self.shares = RemoteShares(KnownPeers(lambda: self.peers, self.peers.remove), FILE_BYTES)

    def load(self, *numbers: int, limit_s: float = LIMIT_S) -> list[bytearray]:
        found = self.shares.load([digest(n) for n in numbers], time.monotonic() + limit_s)
        return [content[60:] for content in found]


def served_by(answer: Callable[[socket.socket], None]) -> PeerAddress:
    """A rank that answers its first question like this."""
    listener = socket.create_server((HOST, 0))

    def serve() -> None:
        with listener, listener.accept()[0] as sock:
            sock.recv(SECRET_BYTES, socket.MSG_WAITALL)
            (count,) = struct.unpack("<I", sock.recv(4, socket.MSG_WAITALL))
            sock.recv(16 * count, socket.MSG_WAITALL)
            answer(sock)

    threading.Thread(target=serve, daemon=True).start()
    return PeerAddress(HOST, listener.getsockname()[1], bytes(SECRET_BYTES))


def test_blocks_come_in_order_up_to_the_first_that_nobody_has(
    make_node: Callable[..., Node],
) -> None:
    reader = Reader(make_node(1, 2, 9).server.address, make_node(3).server.address)
    assert reader.load(1, 2, 3) == [block(1), block(2), block(3)]
    assert reader.load(1, 7, 2) == [block(1)]
    assert reader.load(9) == [block(9)]
    assert reader.load() == []
    assert len(reader.shares._sockets) == 2, "one connection a rank, used again"


def test_a_reader_that_stops_in_the_middle_reads_rightly_afterwards(
    make_node: Callable[..., Node],
) -> None:
    reader = Reader(make_node(*range(50)).server.address)
    content = reader.shares.load([digest(n) for n in range(50)], time.monotonic() + LIMIT_S)
    assert next(content)[60:] == block(0)
    content.close()
    assert reader.load(40, 41) == [block(40), block(41)]


def test_a_dead_rank_is_dropped_and_the_next_asked(make_node: Callable[..., Node]) -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    living = make_node(1).server.address
    reader = Reader(PeerAddress(HOST, port, b""), living)
    assert reader.load(1) == [block(1)]
    assert reader.peers == [living]


@pytest.mark.parametrize("num_bytes", [0, 3, 8, 8 + FILE_BYTES - 1])
def test_an_answer_that_ends_early_is_absent(
    num_bytes: int, make_node: Callable[..., Node]
) -> None:
    node = make_node(1)
    whole = struct.pack("<Q", FILE_BYTES) + node.tier.path(digest(1)).read_bytes()
    broken = served_by(lambda sock: sock.sendall(whole[:num_bytes]))
    assert Reader(broken).load(1) == []
    assert Reader(broken, node.server.address).load(1) == [block(1)]


def test_a_rank_that_does_not_answer_costs_one_limit(make_node: Callable[..., Node]) -> None:
    over = threading.Event()
    silent = served_by(lambda _: over.wait(LIMIT_S) and None)
    reader = Reader(silent, make_node(1).server.address)
    assert reader.load(1, limit_s=0.05) == []
    assert reader.load(1) == [block(1)], "it is left alone: to wait for it would take the limit"
    over.set()


def store_of(node: Node, *peers: PeerAddress) -> BlockStore:
    remote = RemoteShares(KnownPeers(lambda: peers, lambda _: None), node.tier.content_bytes)
    return BlockStore(SIZE, 0, None, node.tier, remote)


def test_a_store_has_what_other_nodes_have(make_node: Callable[..., Node]) -> None:
    here, there = make_node(2, 5), make_node(1, 3, 4)
    store = store_of(here, there.server.address)
    asked = [digest(n) for n in (1, 2, 3, 4, 5, 6)]
    assert list(store.load(asked, LIMIT_S)) == [block(n) for n in (1, 2, 3, 4, 5)]
    assert store.pop_changes()[0] == [digest(n) for n in (1, 3, 4)]
    there.server.close()
    assert list(store.load(asked[:4], LIMIT_S)) == [block(n) for n in (1, 2, 3, 4)], "kept"


def test_a_damaged_block_is_not_believed(make_node: Callable[..., Node]) -> None:
    here, there = make_node(), make_node(1, 2, 3)
    path: Any = there.tier.path(digest(2))
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)
    store = store_of(here, there.server.address)
    asked = [digest(n) for n in (1, 2, 3)]
    assert list(store.load(asked, LIMIT_S)) == [block(1)]
    assert digest(2) not in here.tier


def test_what_comes_from_other_nodes_costs_no_block_of_its_chain(tmp_path: Path) -> None:
    own = SharedTier(tmp_path / "own", "model", SIZE, 4 * 4096)  # a file takes a page
    for number in range(3):
        own.put(digest(number), block(number))
    there = Node(tmp_path, *range(3, 8))
    peers = KnownPeers(lambda: [there.server.address], lambda _: None)
    store = BlockStore(SIZE, 0, None, own, RemoteShares(peers, own.content_bytes))
    chain = [digest(number) for number in range(8)]
    assert list(store.load(chain, LIMIT_S)) == [block(number) for number in range(8)]
    assert sorted(own.held()) == chain[:4]
    store.close()
    there.end()
