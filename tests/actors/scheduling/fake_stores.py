"""The second tier's stores of `fake_stages`: what a device block held, by digest."""

from __future__ import annotations

from collections.abc import MutableMapping

from actors.scheduling.events import ClearTier, KVMove, Save, TierChange

Slots = MutableMapping[tuple[int, int], int]  # (block, offset) -> hash


class FakeStores:
    """One per rank; each may forget what it likes, and need not say so at once."""

    def __init__(self, num_ranks: int, block_size: int) -> None:
        self.block_size = block_size
        self.ranks: list[dict[bytes, list[int | None]]] = [{} for _ in range(num_ranks)]
        self._told: list[set[bytes]] = [set() for _ in range(num_ranks)]
        self._silent: set[bytes] = set()  # gone, and not to be told before they are missed

    def move(self, move: KVMove, most: int, slots: Slots) -> tuple[int, tuple[TierChange, ...]]:
        """Carry a move out, up to `most` blocks of it; what `Moved` says."""
        done = 0
        if isinstance(move, ClearTier):
            self.ranks = [{} for _ in self.ranks]
            self._silent.clear()
        for block, digest in () if isinstance(move, ClearTier) else move.blocks[:most]:
            if isinstance(move, Save):
                content = [slots.get((block, offset)) for offset in range(self.block_size)]
                assert None not in content, "a block that was never computed is saved"
                for store in self.ranks:
                    assert store.get(digest, content) == content, "a digest of two contents"
                    store[digest] = content
                self._silent.discard(digest)
            else:
                if not all(digest in store for store in self.ranks):
                    self._silent.discard(digest)
                    break
                for offset, value in enumerate(self.ranks[0][digest]):
                    assert value is not None
                    slots[block, offset] = value
            done += 1
        return done, tuple([self._changes(rank) for rank in range(len(self.ranks))])

    def _changes(self, rank: int) -> TierChange:
        here, told = set(self.ranks[rank]) | self._silent, self._told[rank]
        added, removed = here - told, told - here
        self._told[rank] = here
        return TierChange(tuple(sorted(added)), tuple(sorted(removed)))

    def forget(self, rank: int, which: int, tells: bool) -> None:
        """Lose one block. tells: with the next answer, not only when it is missed."""
        if rank < len(self.ranks) and self.ranks[rank]:
            digests = sorted(self.ranks[rank])
            gone = digests[which % len(digests)]
            del self.ranks[rank][gone]
            if not tells and gone in self._told[rank]:
                self._silent.add(gone)

    def restart(self) -> tuple[tuple[bytes, ...], ...]:
        """Processes are new; what each rank finds on its disk."""
        self._silent.clear()
        self._told = [set(store) for store in self.ranks]
        return tuple([tuple(sorted(store)) for store in self.ranks])
