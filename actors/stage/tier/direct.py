"""Blocks from device to device, without a copy in host memory.

A rank keeps what it saved last in a part of its device's memory, too, and sends it to the ranks of
other engines that ask. Questions go by TCP (`connections`), blocks by a pair that both devices
belong to, made before the first question. The answer to a question is how many of its digests are
there, from the first, and then these blocks.

This is a shorter way, not another store: what is not there, or does not come in time, is looked for
in the share.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Final, Protocol

import torch

from actors.stage.tier.connections import (
    COUNT,
    KnownPeers,
    PeerAddress,
    PeerServer,
    ask,
    next_question,
    read_exactly,
)

logger = logging.getLogger("legato.tier")

AT_ONCE: Final = 16  # most blocks of one question
# Of a peer that stands still: the share may have what it does not send.
_ANSWER_WITHIN_S: Final = 0.5
_BLOCKS_WITHIN_S: Final = 2.0  # on both sides: kernels that wait for the other one occupy a GPU
_JOIN_WITHIN_S: Final = 30.0
_MOST_LINKS: Final = 8  # each takes memory of the device, where it has buffers
_MOST_SERVED: Final = 16
_IDLE_S: Final = 60.0  # after which a link gives its place to a peer that has none
_LOOK_EVERY_S: Final = 1.0  # for new peers
_DONE_EVERY_S: Final = 0.01  # whether a device has let go of what failed


class Pair(Protocol):
    """See `actors.transport.device_pair.DevicePair`; here a failure is an OSError."""

    def send(self, tensors: Sequence[torch.Tensor], limit_s: float) -> None: ...
    def receive(self, tensors: Sequence[torch.Tensor], limit_s: float) -> None: ...
    def is_done(self) -> bool: ...
    def close(self) -> None: ...


MakePair = Callable[[int, str], Pair]  # of its rank and address; may wait for the other side


class DeviceBlocks:
    """The blocks that were saved last. places: memory of the device, a block each in its first
    dimension. One thread puts, others lend."""

    def __init__(self, places: torch.Tensor) -> None:
        self._places = places
        self._lock = threading.Lock()
        self._free = list(range(len(places)))
        self._known: OrderedDict[bytes, int] = OrderedDict()  # the oldest first
        self._lent: Counter[int] = Counter()
        self._leaving: list[int] = []  # forgotten, but still being sent

    def put(self, digest: bytes, fill: Callable[[torch.Tensor], None]) -> bool:
        """Keep a block in the place of the oldest that nobody is being sent; False if there is
        none. fill: writes the block into its place, and returns when it is there."""
        with self._lock:
            if digest in self._known:
                self._known.move_to_end(digest)
                return True
            number = self._take()
        if number is None:
            return False
        try:
            fill(self._places[number])
        except BaseException:  # of any type: the place is free again
            with self._lock:
                self._free.append(number)
            raise
        with self._lock:
            self._known[digest] = number
        return True

    def clear(self) -> None:
        """Nothing is found any longer; what is being sent stays in its place until it is sent."""
        with self._lock:
            for number in self._known.values():
                (self._leaving if self._lent[number] else self._free).append(number)
            self._known.clear()

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        for digest, number in self._known.items():
            if not self._lent[number]:
                del self._known[digest]
                return number
        return None

    @contextmanager
    def lent(self, digests: Sequence[bytes]) -> Iterator[list[torch.Tensor]]:
        """The places of these up to the first that is not here; they do not change meanwhile."""
        numbers = []
        with self._lock:
            for digest in digests:
                number = self._known.get(digest)
                if number is None:
                    break
                numbers.append(number)
            self._lent.update(numbers)
        try:
            yield [self._places[number] for number in numbers]
        finally:
            with self._lock:
                self._lent.subtract(numbers)
                self._free += [number for number in self._leaving if not self._lent[number]]
                self._leaving = [number for number in self._leaving if self._lent[number]]


class DirectServer(PeerServer):
    """Sends blocks to whoever knows `address`."""

    def __init__(
        self, host: str, blocks: DeviceBlocks, make_pair: MakePair, free_address: Callable[[], str]
    ) -> None:
        """free_address: an address for a pair, "host:port"."""
        self._blocks = blocks
        self._make_pair = make_pair
        self._free_address = free_address
        self._places = threading.BoundedSemaphore(_MOST_SERVED)
        super().__init__(host, self._send_all)

    def _send_all(self, sock: socket.socket) -> None:
        if not self._places.acquire(blocking=False):
            return
        try:
            address = self._free_address().encode()
            sock.sendall(COUNT.pack(len(address)) + address)
            with closing(self._make_pair(0, address.decode())) as pair:
                while True:
                    with self._blocks.lent(next_question(sock)) as places:
                        sock.sendall(COUNT.pack(len(places)))
                        try:
                            pair.send(places, _BLOCKS_WITHIN_S)
                        finally:
                            while not pair.is_done():  # what has failed may still read them
                                time.sleep(_DONE_EVERY_S)
        finally:
            self._places.release()


class _Link:
    """A connection to a peer, and the pair with its device. Raises OSError, as all its calls do,
    after which it is of no use."""

    def __init__(self, sock: socket.socket, make_pair: MakePair) -> None:
        self._sock = sock
        self.last_used_s = time.monotonic()
        sock.settimeout(_JOIN_WITHIN_S)
        (length,) = COUNT.unpack(read_exactly(sock, COUNT.size))
        self._pair = make_pair(1, read_exactly(sock, length).decode())

    def fetch(self, digests: Sequence[bytes], landing: torch.Tensor, deadline_s: float) -> int:
        """Fill the first places with these, up to the first that is not there; returns how many."""
        self._sock.settimeout(_left_s(deadline_s, _ANSWER_WITHIN_S))
        ask(self._sock, digests)
        (count,) = COUNT.unpack(read_exactly(self._sock, COUNT.size))
        if count:
            self.last_used_s = time.monotonic()
            self._pair.receive(list(landing[:count]), _left_s(deadline_s, _BLOCKS_WITHIN_S))
        return int(count)

    def is_done(self) -> bool:
        """Whether nothing is written any more, also by what has failed."""
        return self._pair.is_done()

    def close(self) -> None:
        self._sock.close()
        self._pair.close()


def _left_s(deadline_s: float, most_s: float) -> float:
    return min(most_s, max(0.001, deadline_s - time.monotonic()))


class DirectPeers:
    """What other ranks have on their devices. One thread calls `load`; links are made on others, so
    that no block waits for one.

    landing: memory of the device for the blocks of one question.
    """

    def __init__(self, peers: KnownPeers, make_pair: MakePair, landing: torch.Tensor) -> None:
        self._peers = peers
        self._make_pair = make_pair
        self._landing = landing
        self._links: dict[PeerAddress, _Link] = {}
        self._lock = threading.Lock()  # of the next, and of giving up a link that is not it
        self._asked: _Link | None = None  # in use now
        self._failed: list[_Link] = []  # which may still write to `_landing`
        self._joining: set[PeerAddress] = set()
        self._best: PeerAddress | None = None  # the last one that had something
        self._ends = threading.Event()

    def start(self) -> None:
        """Make links to all that appear, from now on."""
        threading.Thread(target=self._follow, name="legato-tier-links", daemon=True).start()

    def _follow(self) -> None:
        while not self._ends.wait(_LOOK_EVERY_S):
            self.look()

    def look(self) -> list[threading.Thread]:
        """Begin to make links to the peers that have none; returns what makes them, a thread each:
        a device whose other side dies meanwhile may keep it for ever."""
        made = []
        for peer in self._peers.available():
            if peer in self._links or peer in self._joining:
                continue
            if len(self._links) + len(self._joining) >= _MOST_LINKS and not self._give_up_one():
                break
            self._joining.add(peer)
            made.append(threading.Thread(target=self._join, args=[peer], daemon=True))
            made[-1].start()
        return made

    def _give_up_one(self) -> bool:
        """End the link that has been of no use for longest, if for long."""
        with self._lock:
            links = [both for both in list(self._links.items()) if both[1] is not self._asked]
            if not links:  # all are being made, or in use
                return False
            peer, link = min(links, key=lambda both: both[1].last_used_s)
            if time.monotonic() - link.last_used_s < _IDLE_S:
                return False
            self._links.pop(peer, None)
        link.close()
        return True

    def _join(self, peer: PeerAddress) -> None:
        try:
            sock = self._peers.connect(peer, time.monotonic() + _JOIN_WITHIN_S)
            if sock is None:
                return
            try:
                self._links[peer] = _Link(sock, self._make_pair)
            except OSError as error:
                logger.info("no way to the device of %s:%d: %s", peer.host, peer.port, error)
                sock.close()
                self._peers.pause(peer)
        finally:
            self._joining.discard(peer)

    def load(self, digests: Sequence[bytes], deadline_s: float) -> Iterator[torch.Tensor]:
        """These blocks in order, some at once, up to the first that nobody has or that is not here
        at `deadline_s` (by `time.monotonic`). The next call overwrites them."""
        count = 0
        for peer in sorted(self._links, key=lambda peer: peer != self._best):
            while count < len(digests):
                asked = digests[count : count + len(self._landing)]
                num_found = self._fetch(peer, asked, deadline_s)
                if num_found:
                    self._best = peer
                    count += num_found
                    yield self._landing[:num_found]
                if num_found < len(asked):
                    break

    def _fetch(self, peer: PeerAddress, digests: Sequence[bytes], deadline_s: float) -> int:
        self._failed = [failed for failed in self._failed if not failed.is_done()]
        if self._failed or time.monotonic() >= deadline_s:
            return 0
        with self._lock:
            link = self._asked = self._links.get(peer)
        if link is None:
            return 0
        try:
            return link.fetch(digests, self._landing, deadline_s)
        except OSError as error:
            logger.info("no block from the device of %s:%d: %s", peer.host, peer.port, error)
            self._peers.pause(peer)
            self._end(peer, link)
            self._failed.append(link)
            return 0
        finally:
            self._asked = None

    def _end(self, peer: PeerAddress, link: _Link) -> None:
        self._links.pop(peer, None)
        link.close()

    def close(self) -> None:
        """Make no more links, and end those that there are."""
        self._ends.set()
        for peer, link in list(self._links.items()):
            self._end(peer, link)
