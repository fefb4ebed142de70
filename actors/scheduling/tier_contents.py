"""Which blocks the second tier holds, on every rank, as the ranks report it; and their moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.scheduling.state import RequestState


class TierContents:
    """num_held: digests that every rank stores. num_clears: deletions of everything that are under
    way, until when nothing counts as held."""

    def __init__(self, num_ranks: int) -> None:
        self.num_held = self.num_clears = 0
        self._everywhere = (1 << num_ranks) - 1
        self._ranks_with: dict[bytes, int] = {}  # digest -> a bit per rank

    @property
    def is_empty(self) -> bool:
        """Whether no rank stores anything that counts."""
        return self.num_clears > 0 or not self._ranks_with

    def holds(self, digest: bytes) -> bool:
        return not self.num_clears and self._ranks_with.get(digest) == self._everywhere

    def replace(self, ranks: Sequence[Sequence[bytes]]) -> None:
        """Replace what is known by each rank's complete list."""
        self._ranks_with.clear()
        self.num_held = 0
        for rank, digests in enumerate(ranks):
            self.change(rank, digests, ())

    def change(self, rank: int, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        known, bit = self._ranks_with, 1 << rank
        for digest in added:
            before = known.get(digest, 0)
            known[digest] = after = before | bit
            self.num_held += (after == self._everywhere) - (before == self._everywhere)
        for digest in removed:
            before = known.pop(digest, 0)
            self.num_held -= before == self._everywhere
            if before & ~bit:
                known[digest] = before & ~bit


@dataclass(slots=True)
class PendingMove:
    """A move in progress. held: referenced device blocks; of a fetch, the cached prefix first."""

    held: list[int]
    blocks: tuple[tuple[int, bytes], ...]
    begun_s: float
    waiting: list[RequestState] = field(default_factory=list)  # set aside until the answer
    is_stale: bool = False  # the prefix cache was reset since
