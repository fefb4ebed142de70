"""Blocks from device to device: those asked for, as they were, in time, or none. The devices are
CPUs, joined by gloo."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch

from actors.stage.tier import direct
from actors.stage.tier.connections import KnownPeers, PeerAddress
from actors.stage.tier.direct import AT_ONCE, DeviceBlocks, DirectPeers, DirectServer, Pair
from actors.transport.addresses import free_address
from actors.transport.device_pair import DevicePair
from tests.actors.stage.tier.test_device_blocks import SHAPE, block, blocks_of, fills
from tests.actors.stage.tier.test_shared import digest

HOST = "127.0.0.1"
LIMIT_S = 30.0

make_pair = partial(DevicePair, device=torch.device("cpu"))
free = partial(free_address, HOST)


class Ranks:
    """Some that serve, and one that asks all of them."""

    def __init__(self, make: Callable[[int, str], Pair], *served: DeviceBlocks) -> None:
        self.servers = [DirectServer(HOST, blocks, make, free) for blocks in served]
        self.known = [server.address for server in self.servers]
        peers = KnownPeers(lambda: self.known, self.known.remove)
        self.peers = DirectPeers(peers, make, torch.zeros((AT_ONCE, *SHAPE), dtype=torch.int32))

    def join(self) -> int:
        """Make the links that are to be made; how many were tried."""
        threads = self.peers.look()
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
        return len(threads)

    def load(self, numbers: Sequence[int], limit_s: float = LIMIT_S) -> list[int]:
        """Numbers of those that come, each of which is right."""
        found = []
        for places in self.peers.load([digest(n) for n in numbers], time.monotonic() + limit_s):
            for place in places:
                found.append(int(place.flatten()[0]) // 1000)
                assert torch.equal(place, block(found[-1]))
        return found


@pytest.fixture
def make_ranks() -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(*served: DeviceBlocks, make_pair: Callable[[int, str], Pair] = make_pair) -> Ranks:
        made.append(Ranks(make_pair, *served))
        return made[-1]

    yield make
    for ranks in made:
        ranks.peers.close()
        for server in ranks.servers:
            server.close()


def test_blocks_come_in_order_up_to_the_first_that_nobody_has(
    make_ranks: Callable[..., Ranks],
) -> None:
    many = list(range(2 * AT_ONCE + 3))
    ranks = make_ranks(blocks_of(50, *many), blocks_of(5, 70, 71))
    assert ranks.load(many) == [], "no link yet: a block waits for none"
    ranks.join()
    assert ranks.load(many) == many
    assert ranks.load([4, 70, 71, 9, 72, 1]) == [4, 70, 71], "each rank is asked once"
    assert ranks.load([70, 4]) == [70, 4]
    assert ranks.load([99]) == []
    assert ranks.load(many[::-1]) == many[::-1]
    assert ranks.load(many, limit_s=0.0) == []


class Dies:
    """A pair whose device fails in the middle of its second answer."""

    def __init__(self, rank: int, address: str) -> None:
        self._pair = make_pair(rank, address)
        self._num_sent = 0

    def send(self, tensors: Sequence[torch.Tensor], limit_s: float) -> None:
        self._num_sent += 1
        if self._num_sent == 2:
            self._pair.send(tensors[:1], limit_s)
            raise OSError("the device has gone")
        self._pair.send(tensors, limit_s)

    def receive(self, tensors: Sequence[torch.Tensor], limit_s: float) -> None:
        self._pair.receive(tensors, limit_s)

    def is_done(self) -> bool:
        return self._pair.is_done()

    def close(self) -> None:
        self._pair.close()


def test_an_answer_that_ends_early_is_absent(make_ranks: Callable[..., Ranks]) -> None:
    numbers = list(range(2 * AT_ONCE))
    served = blocks_of(50, *numbers)
    ranks = make_ranks(served, make_pair=Dies)
    ranks.join()
    assert ranks.load(numbers) == numbers[:AT_ONCE]
    assert ranks.load(numbers) == [], "its link has ended"
    for number in range(100, 150):  # nothing is lent for ever
        assert served.put(digest(number), fills(number))


class Lingers(Dies):
    """One whose operations fail on one side, and whose kernels run on until they are let go."""

    def __init__(self, failing: int, let_go: threading.Event, rank: int, address: str) -> None:
        super().__init__(rank, address)
        self._fails = rank == failing
        self._let_go = let_go

    def send(self, tensors: Sequence[torch.Tensor], limit_s: float) -> None:
        if self._fails:
            raise OSError("not done in time")
        self._pair.send(tensors, limit_s)

    def receive(self, tensors: Sequence[torch.Tensor], limit_s: float) -> None:
        if self._fails and not self._let_go.is_set():
            raise OSError("not done in time")
        self._pair.receive(tensors, limit_s)

    def is_done(self) -> bool:
        return not self._fails or self._let_go.is_set()


def test_nothing_lands_where_a_failed_transfer_may_still_write(
    make_ranks: Callable[..., Ranks],
) -> None:
    let_go = threading.Event()
    make = partial(Lingers, 1, let_go)
    ranks = make_ranks(blocks_of(3, 1), blocks_of(3, 1), make_pair=make)
    ranks.join()
    assert ranks.load([1]) == [], "one link has failed, and its peer may send yet"
    assert ranks.load([1]) == [], "so the other one is not asked either"
    let_go.set()
    assert ranks.load([1]) == [1]


def test_what_a_failed_transfer_may_still_read_keeps_its_place(
    make_ranks: Callable[..., Ranks],
) -> None:
    let_go = threading.Event()
    served = blocks_of(1, 1)
    ranks = make_ranks(served, make_pair=partial(Lingers, 0, let_go))
    ranks.join()
    assert ranks.load([1], limit_s=0.2) == []
    assert not served.put(digest(2), pytest.fail)
    let_go.set()
    end_s = time.monotonic() + LIMIT_S
    while not served.put(digest(2), fills(2)):
        assert time.monotonic() < end_s
        time.sleep(0.02)  # polling, bounded


def test_a_rank_that_stands_still_costs_little_and_the_next_is_asked(
    make_ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "_ANSWER_WITHIN_S", 0.1)
    over = threading.Event()
    silent, lively = blocks_of(3, 1), blocks_of(3, 1)
    monkeypatch.setattr(silent, "lent", lambda _: over.wait(LIMIT_S))
    ranks = make_ranks(silent, lively)
    ranks.join()
    assert ranks.load([1]) == [1]
    assert ranks.load([1]) == [1]
    over.set()


def test_a_peer_that_cannot_join_is_left_alone(make_ranks: Callable[..., Ranks]) -> None:
    tries: list[int] = []

    def fails(rank: int, address: str) -> Pair:
        tries.append(rank)
        raise OSError("no device")

    ranks = make_ranks(blocks_of(3, 1), make_pair=fails)
    for _ in range(3):
        ranks.join()
    assert tries.count(1) == 1
    assert ranks.load([1]) == []


def test_only_so_many_links_are_made_and_the_idle_one_gives_way(
    make_ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "_MOST_LINKS", 1)
    ranks = make_ranks(blocks_of(3, 1), blocks_of(3, 2))
    assert ranks.join() == 1
    assert ranks.load([1]) + ranks.load([2]) == [1]
    assert ranks.join() == 0
    monkeypatch.setattr(direct, "_IDLE_S", 0.0)
    assert ranks.join() == 1
    assert ranks.load([1]) + ranks.load([2]) == [2]


class Waits(Dies):
    """One that receives only once it is let."""

    def __init__(
        self, waits: threading.Event, let_go: threading.Event, rank: int, address: str
    ) -> None:
        super().__init__(rank, address)
        self._waits, self._let_go = waits, let_go

    def receive(self, tensors: Sequence[torch.Tensor], limit_s: float) -> None:
        self._waits.set()
        self._let_go.wait(LIMIT_S)
        self._pair.receive(tensors, limit_s)


def test_a_link_that_receives_is_not_given_up(
    make_ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "_MOST_LINKS", 1)
    monkeypatch.setattr(direct, "_IDLE_S", 0.0)
    monkeypatch.setattr(direct, "_BLOCKS_WITHIN_S", LIMIT_S)
    waits, let_go = threading.Event(), threading.Event()
    make = partial(Waits, waits, let_go)
    ranks = make_ranks(blocks_of(3, 1), blocks_of(3, 2), make_pair=make)
    assert ranks.join() == 1
    found: list[int] = []
    loads = threading.Thread(target=lambda: found.extend(ranks.load([1])))
    loads.start()
    assert waits.wait(LIMIT_S)
    num_tried = ranks.join()
    let_go.set()
    loads.join(LIMIT_S)
    assert (num_tried, found) == (0, [1])
    assert ranks.join() == 1, "it is idle again"
    assert ranks.load([2]) == [2]


def test_a_rank_serves_only_so_many(
    make_ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "_MOST_SERVED", 1)
    ranks = make_ranks(blocks_of(3, 1))
    ranks.join()
    others = KnownPeers(lambda: ranks.known, ranks.known.remove)
    late = DirectPeers(others, make_pair, torch.zeros((1, *SHAPE), dtype=torch.int32))
    for thread in late.look():
        thread.join(LIMIT_S)
    assert not list(late.load([digest(1)], time.monotonic() + LIMIT_S))
    assert ranks.load([1]) == [1]


def test_a_device_that_waits_for_a_dead_peer_keeps_nobody_else(
    make_ranks: Callable[..., Ranks],
) -> None:
    over = threading.Event()

    def waits_at_first(rank: int, address: str) -> Pair:
        if rank == 1 and not over.is_set() and not first.acquire(blocking=False):
            over.wait(LIMIT_S)
        return make_pair(rank, address)

    first = threading.Semaphore(1)
    ranks = make_ranks(blocks_of(3, 1), blocks_of(3, 1), make_pair=waits_at_first)
    threads = ranks.peers.look()
    assert len(threads) == 2
    end_s = time.monotonic() + LIMIT_S
    while not ranks.load([1]):
        assert time.monotonic() < end_s
        time.sleep(0.02)  # polling, bounded
    assert ranks.peers.look() == [], "it is still being made"
    over.set()
    for thread in threads:
        thread.join(LIMIT_S)


def test_those_who_are_known_later_are_linked_too(make_ranks: Callable[..., Ranks]) -> None:
    ranks = make_ranks(blocks_of(3, 1))
    known: list[PeerAddress] = list(ranks.known)
    ranks.known.clear()
    ranks.join()
    assert ranks.load([1]) == []
    ranks.known.extend(known)
    ranks.join()
    assert ranks.load([1]) == [1]
