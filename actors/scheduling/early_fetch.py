"""Blocks that a peer has saved of streams that are expected here.

They are fetched into the prefix cache a piece at a time, in the order in which they were told, so
that a stream which comes with its first token, or from an engine that drains, lacks only the last
ones. Fetched blocks that no stream has asked for are evictable like any other, and fill at most
half of the free memory: running requests grow into the rest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

MOST_AT_ONCE = 16  # blocks of one fetch: a stream that has come waits for one at most
_EXPECTED_FOR_S = 10.0  # a stream that has not come by then is no longer expected


class EarlyFetches:
    """What is to be fetched early, and what of it no stream has asked for yet; both oldest first
    and forgotten after some seconds. It moves nothing itself: `second_tier` does."""

    def __init__(self) -> None:
        self._wanted: OrderedDict[bytes, float] = OrderedDict()  # digest -> when it was told
        self._unclaimed: OrderedDict[bytes, float] = OrderedDict()  # fetched -> when it was told
        self.num_taken = 0  # blocks, ever
        self.num_queued = 0  # blocks that were to be fetched, ever
        self.num_coming = 0  # blocks that fetches under way have taken

    @property
    def num_unclaimed(self) -> int:
        return len(self._unclaimed)

    @property
    def num_settled(self) -> int:
        """How many of the queued blocks were fetched or given up."""
        return self.num_queued - len(self._wanted) - self.num_coming

    @property
    def is_wanted(self) -> bool:
        return bool(self._wanted)

    def add(self, digests: Iterable[bytes], now_s: float, most: int) -> None:
        """These are saved. At most `most` are remembered."""
        for digest in digests:
            if digest not in self._wanted:
                self._wanted[digest] = now_s
                self.num_queued += 1
        while len(self._wanted) > most:
            self._wanted.popitem(last=False)

    def take(self, is_known: Callable[[bytes], bool], room: int, now_s: float) -> list[bytes]:
        """The next ones, which now count as fetched; [] if there is no room for any.

        is_known: those that are here or coming, which are dropped. room: blocks of memory for all
        that no stream has asked for.
        """
        for known in (self._wanted, self._unclaimed):
            while known and now_s - next(iter(known.values())) > _EXPECTED_FOR_S:
                known.popitem(last=False)
        taken: list[bytes] = []
        while self._wanted and len(taken) < MOST_AT_ONCE and self.num_unclaimed < room:
            digest, told_s = self._wanted.popitem(last=False)
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
        self._wanted.clear()
        self._unclaimed.clear()
        self.num_coming = 0
