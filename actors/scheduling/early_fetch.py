"""Blocks that a peer has saved of streams that are expected here.

They are fetched into the prefix cache a piece at a time, in the order in which they were told, so
that a stream which comes with its first token, or from an engine that drains, lacks only the last
ones. The last ones of a stream that is about to come go before those of streams that are not.
Fetched blocks that no stream has asked for are evictable like any other, and fill at most half of
the free memory, but for such last ones: running requests grow into the rest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

MOST_AT_ONCE = 16  # blocks of one fetch: a stream that has come waits for one at most
_EXPECTED_FOR_S = 10.0  # a stream that has not come by then is no longer expected


class EarlyFetches:
    """What is to be fetched early, and what of it no stream has asked for yet; oldest first, and
    forgotten after some seconds. It moves nothing itself: `second_tier` does."""

    def __init__(self) -> None:
        self._first: OrderedDict[bytes, float] = OrderedDict()  # they go before the others
        self._wanted: OrderedDict[bytes, float] = OrderedDict()  # digest -> when it was told
        self._unclaimed: OrderedDict[bytes, float] = OrderedDict()  # fetched -> when it was told
        self.num_taken = 0  # blocks, ever

    @property
    def num_unclaimed(self) -> int:
        return len(self._unclaimed)

    @property
    def is_wanted(self) -> bool:
        return bool(self._first or self._wanted)

    def wants(self, digest: bytes) -> bool:
        """Whether it is to be fetched, and neither taken nor given up."""
        return digest in self._first or digest in self._wanted

    def add(self, digests: Sequence[bytes], now_s: float, most: int, is_last: bool = False) -> None:
        """These are saved. At most `most` are remembered. is_last: they go before all others."""
        for digest in digests:
            if is_last:
                self._first[digest] = self._wanted.pop(digest, now_s)
            elif digest not in self._first:
                self._wanted.setdefault(digest, now_s)
        for known in (self._first, self._wanted):
            while len(known) > most:
                known.popitem(last=False)

    def take(self, is_known: Callable[[bytes], bool], room: int, now_s: float) -> list[bytes]:
        """The next ones, which now count as fetched; [] if there is no room for any.

        is_known: those that are here or coming, which are dropped. room: blocks of memory for all
        that no stream has asked for; twice as many with those that go first.
        """
        for known in (self._first, self._wanted, self._unclaimed):
            while known and now_s - next(iter(known.values())) > _EXPECTED_FOR_S:
                known.popitem(last=False)
        taken: list[bytes] = []
        for wanted, most in ((self._first, 2 * room), (self._wanted, room)):
            while wanted and len(taken) < MOST_AT_ONCE and self.num_unclaimed < most:
                digest, told_s = wanted.popitem(last=False)
                if not is_known(digest):
                    taken.append(digest)
                    self._unclaimed[digest] = told_s
        self.num_taken += len(taken)
        return taken

    def claimed(self, digests: Sequence[bytes]) -> None:
        """A stream asks for these, or they did not come."""
        if self._unclaimed:
            for digest in digests:
                self._unclaimed.pop(digest, None)

    def clear(self) -> None:
        self._first.clear()
        self._wanted.clear()
        self._unclaimed.clear()
