"""Completed blocks that are to be saved into the second tier, in order, and those being saved."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice


class SaveQueue:
    """num_queued: blocks to be saved, ever; each gets this as its number. saving: of each save
    under way, its blocks' numbers."""

    def __init__(self) -> None:
        self.num_queued = 0
        self._num_awaited = 0  # a peer waits for all up to this number
        self._hurried: tuple[bytes, ...] | None = None  # see `hurry`, until the next `add`
        self.saving: dict[int, dict[bytes, int]] = {}  # by move
        self._first: OrderedDict[bytes, int] = OrderedDict()  # they go before the others
        self._unsaved: OrderedDict[bytes, int] = OrderedDict()

    @property
    def num_unsaved(self) -> int:
        return len(self._first) + len(self._unsaved)

    @property
    def num_saving(self) -> int:
        return sum([len(numbers) for numbers in self.saving.values()])

    @property
    def num_settled(self) -> int:
        """All blocks up to this number are saved or given up."""
        open_numbers = [*self._first.values(), *islice(self._unsaved.values(), 1)]
        open_numbers += [n for numbers in self.saving.values() for n in numbers.values()]
        return min(open_numbers, default=self.num_queued + 1) - 1

    @property
    def is_awaited(self) -> bool:
        """Whether a peer waits for one that is not being saved yet."""
        oldest = next(iter(self._unsaved.values()), self.num_queued + 1)
        return bool(self._first) or oldest <= self._num_awaited

    def is_open(self, digest: bytes) -> bool:
        """Whether it is queued or being saved."""
        if digest in self._first or digest in self._unsaved:
            return True
        return any(digest in numbers for numbers in self.saving.values())

    def hurry(self, first: tuple[bytes, ...] = ()) -> None:
        """A peer waits for all that are queued with the next call of `add`, which comes at once.
        first: it waits only for these of them, which go before all others."""
        self._hurried = first

    def add(self, digests: Iterable[bytes], most: int) -> None:
        """Queue these; at most `most` stay queued, the newest ones."""
        for digest in digests:
            if digest not in self._unsaved and digest not in self._first:
                self.num_queued += 1
                self._unsaved[digest] = self.num_queued
        while len(self._unsaved) > most:
            self._unsaved.popitem(last=False)
        if self._hurried is not None:
            for digest in self._hurried:
                if (number := self._unsaved.pop(digest, None)) is not None:
                    self._first[digest] = number
            if not self._hurried:
                self._num_awaited = self.num_queued
            self._hurried = None

    def take(
        self, move_id: int, find: Callable[[Sequence[bytes]], list[int]], most: int
    ) -> list[tuple[int, bytes]]:
        """(block, digest) of the oldest, which are no longer queued, but being saved by this move;
        `find` gives a block that is still there. What goes first goes alone: a save is answered
        as a whole."""
        found: list[tuple[int, bytes]] = []
        numbers: dict[bytes, int] = {}
        for queue in (self._first, self._unsaved):
            while queue and len(found) < most:
                digest, number = queue.popitem(last=False)
                if here := find((digest,)):
                    found.append((here[0], digest))
                    numbers[digest] = number
            if found:
                self.saving[move_id] = numbers
                break
        return found

    def forget(self) -> None:
        """Give up what is queued."""
        self._first.clear()
        self._unsaved.clear()

    def clear(self) -> None:
        """Give up what is queued or being saved."""
        self.forget()
        self.saving.clear()
