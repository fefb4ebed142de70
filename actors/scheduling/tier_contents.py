"""Which blocks the second tier holds: on every rank, as the ranks report it."""

from __future__ import annotations

from collections.abc import Sequence


class TierContents:
    """num_held: digests that every rank stores."""

    def __init__(self, num_ranks: int) -> None:
        self.num_held = 0
        self._everywhere = (1 << num_ranks) - 1
        self._ranks_with: dict[bytes, int] = {}  # digest -> a bit per rank

    @property
    def is_empty(self) -> bool:
        """Whether no rank stores anything."""
        return not self._ranks_with

    def holds(self, digest: bytes) -> bool:
        return self._ranks_with.get(digest) == self._everywhere

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
