"""Completed blocks that are to be saved into the second tier, in order, and those being saved."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class SaveQueue:
    """num_queued: blocks to be saved, ever. saving: of each save under way, how many blocks."""

    def __init__(self) -> None:
        self.num_queued = 0
        self._num_awaited = 0  # of these, in their order
        self._hurries = False
        self.saving: dict[int, int] = {}  # by move
        self._unsaved: OrderedDict[bytes, None] = OrderedDict()

    @property
    def num_unsaved(self) -> int:
        return len(self._unsaved)

    @property
    def num_saving(self) -> int:
        return sum(self.saving.values())

    @property
    def num_settled(self) -> int:
        """Of the queued blocks, in their order, how many are saved or given up."""
        return self.num_queued - len(self._unsaved) - self.num_saving

    @property
    def is_awaited(self) -> bool:
        """Whether a peer waits for one that is not being saved yet."""
        return self.num_queued - len(self._unsaved) < self._num_awaited

    def hurry(self) -> None:
        """A peer waits for all that are queued with the next call of `add`, which comes at once."""
        self._hurries = True

    def add(self, digests: Iterable[bytes], most: int) -> None:
        """Queue these; at most `most` stay queued, the newest ones."""
        for digest in digests:
            if digest not in self._unsaved:
                self._unsaved[digest] = None
                self.num_queued += 1
        while len(self._unsaved) > most:
            self._unsaved.popitem(last=False)
        if self._hurries:
            self._num_awaited, self._hurries = self.num_queued, False

    def take(
        self, find: Callable[[Sequence[bytes]], list[int]], most: int
    ) -> list[tuple[int, bytes]]:
        """(block, digest) of the oldest, which are no longer queued; `find` gives a block that is
        still there."""
        found: list[tuple[int, bytes]] = []
        while self._unsaved and len(found) < most:
            digest, _ = self._unsaved.popitem(last=False)
            found += [(block, digest) for block in find((digest,))]
        return found

    def clear(self) -> None:
        """Give up what is queued or being saved."""
        self._unsaved.clear()
        self.saving.clear()
