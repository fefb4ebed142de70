"""Paged KV memory: references to blocks, and the content of free ones (prefix cache).

A block is in exactly one of three places: *held* (reference count > 0), *cached* (unreferenced,
its content findable by digest, evicted least recently used first) or *empty*. Cached and empty
blocks are free.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from actors.scheduling.memory.saved_states import SavedStates


class BlockManager:
    """Reference-counted blocks 0 .. num_blocks - 1 with a content-addressed prefix cache.

    `version` grows whenever memory is freed: a refused allocation need not be tried again before.
    `num_let_go` grows whenever one that holds blocks which can be found holds them no longer.
    """

    __slots__ = ("_by_digest", "_cached", "_changed", "_completed", "_digest_of", "_empty",
                 "_known_held", "_references", "_told", "_twin_of", "_twins", "num_blocks",
                 "num_evictions", "num_let_go", "states", "version")  # fmt: skip

    def __init__(self, num_blocks: int, num_saved_states: int | None = None) -> None:
        self.num_blocks = num_blocks
        self.states = None if num_saved_states is None else SavedStates(num_saved_states)
        self.version = self.num_let_go = 0
        self.num_evictions = 0
        self._completed: list[bytes] | None = None  # see `pop_completed`
        self._known_held: tuple[object, int] = (None, 0)  # the last answer of `num_held`
        self.reset()

    def reset(self) -> None:
        """Reset: all blocks empty, nothing cached."""
        self._empty = list(range(self.num_blocks - 1, -1, -1))  # a stack, lowest id on top
        self._references = [0] * self.num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()  # free but named, oldest first
        if self.states is not None:
            self.states.reset()
        self.forget()

    def forget(self) -> None:
        """Nothing is found any longer: what is cached is empty now, what is held once it is let
        go."""
        self._empty += self._cached
        self._cached.clear()
        self._digest_of: dict[int, bytes] = {}  # of held and cached blocks with known content
        self._by_digest: dict[bytes, int] = {}  # the inverse
        self._twin_of: dict[int, bytes] = {}  # of held blocks whose content another one names
        self._twins: dict[bytes, list[int]] = {}  # the inverse
        self._changed: dict[bytes, bool] | None = None  # see `pop_changes`
        self._told: list[bytes] = []  # there
        if self.states is not None:
            self.states.forget()
        self.version += 1
        self.num_let_go += 1

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be hit."""
        return len(self._cached)

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= len(self._empty) + len(self._cached)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks of unspecified content, each with one reference.

        Requires `can_allocate`; raises MemoryError otherwise and takes nothing.
        """
        empty, references = self._empty, self._references
        if num_blocks > len(empty) + len(self._cached):
            raise MemoryError(f"{num_blocks} blocks asked for, {self.num_free} free")
        taken: list[int] = []
        for _ in range(num_blocks):
            block = empty.pop() if empty else self._evict()
            references[block] = 1
            taken.append(block)
        return taken

    def _evict(self) -> int:
        """Take the cached block that was used least recently; its content is lost."""
        block, _ = self._cached.popitem(last=False)
        digest = self._digest_of.pop(block)
        del self._by_digest[digest]
        self.num_evictions += 1
        if self._changed is not None:
            self._changed[digest] = False
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that are held or cached."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference each, the last block first: a chain is evicted from its tail."""
        self.version += 1
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._digest_of and not self._gives_name(block):
                    self._cached[block] = None
                    self.num_let_go += 1
                else:
                    self._forget_twin(block)
                    self._empty.append(block)

    def _gives_name(self, block: int) -> bool:
        """Let a held block of the same content have the name of this one, if there is one."""
        if not (twins := self._twins.get(self._digest_of[block])):
            return False
        twin, digest = twins[0], self._digest_of.pop(block)
        self._forget_twin(twin)
        self._by_digest[digest], self._digest_of[twin] = twin, digest
        return True

    def _forget_twin(self, block: int) -> None:
        if (digest := self._twin_of.pop(block, None)) is None:
            return
        twins = self._twins[digest]
        twins.remove(block)
        if not twins:
            del self._twins[digest]

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix that can be continued; no reference is taken."""
        found: list[int] = []
        for digest in digests:
            block = self._by_digest.get(digest)
            if block is None:
                break
            found.append(block)
        return (
            found if self.states is None else found[: self.states.num_blocks(digests[: len(found)])]
        )

    def use_state(self, request_id: int, blocks: Sequence[int]) -> int | None:
        """The row of the state behind these blocks, which `match` returned; None without states,
        or without blocks."""
        if self.states is None or not blocks:
            return None
        return self.states.use(request_id, self._digest_of[blocks[-1]])

    def num_held(
        self, name: object, digest_of: Callable[[int], bytes], most: int, leaving: Mapping[int, int]
    ) -> int:
        """How many of the first `most` digests are of held blocks, not counting the references in
        `leaving`: until a block is let go, those known to be are not looked at again. None where a
        request begins with saved states alone, of which this does not tell.

        name: tells one sequence of digests from another.
        """
        if self.states is not None:
            return 0
        when, known = self._known_held
        if when != (name, self.num_let_go):
            when, known = (name, self.num_let_go), 0
        while known < most:
            block = self._by_digest.get(digest_of(known))
            if block is None or self._references[block] <= leaving.get(block, 0):
                break
            known += 1
        self._known_held = when, known
        return known

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are free now and would be held after `share`."""
        return sum(1 for block in blocks if self._references[block] == 0)

    def num_freed_by(self, tables: Iterable[Sequence[int]], keep: Iterable[int] = ()) -> int:
        """Blocks of these that nothing else refers to; `keep` is not counted."""
        counts = Counter(block for table in tables for block in table)
        for block in keep:
            counts.pop(block, None)
        return sum(1 for block, count in counts.items() if self._references[block] == count)

    def commit(self, block: int, digest: bytes) -> None:
        """Name a held block whose content is computed and final, so that others may find it.

        A second block of the same content stays private. Only where states are kept, after which
        blocks that are there are computed again, it takes the place of one that is free, or becomes
        so: that would be evicted before those that follow in the held table.
        """
        other = None if self.states is None else self._by_digest.get(digest)
        if other is not None and block not in self._digest_of and block not in self._twin_of:
            self._twin_of[block] = digest
            self._twins.setdefault(digest, []).append(block)
            if not self._references[other]:
                del self._cached[other]
                self._gives_name(other)
                self._empty.append(other)
        elif digest not in self._by_digest and block not in self._digest_of:
            self._by_digest[digest] = block
            self._digest_of[block] = digest
            if self._changed is not None:
                self._changed[digest] = True
            if self._completed is not None:
                self._completed.append(digest)

    def findable(self) -> list[bytes]:
        """Digests of all that can be hit: of blocks or, where states are kept, of the last block
        that each saved state is of. The blocks before that one are held by all that hold it, and
        evicted after it."""
        if self.states is None:
            return list(self._by_digest)
        return [digest for digest in self.states.digests if digest in self._by_digest]

    def pop_completed(self) -> list[bytes]:
        """Digests of blocks whose content became final since the last call; none on the first."""
        completed, self._completed = self._completed or [], []
        return completed

    def pop_changes(self) -> tuple[bool, list[bytes], list[bytes]]:
        """(whole, digests added since the last call, digests removed).

        whole: the first list is complete, on the first call or after a reset. Changes are
        collected from the first call on, so a caller must keep calling.
        """
        changed, self._changed = self._changed, {}
        gone = None if self.states is None else self.states.pop_gone()
        if changed is None:
            self._told = self.findable()
            return True, self._told, []
        if gone is None:
            added = [digest for digest, here in changed.items() if here]
            return False, added, [digest for digest, here in changed.items() if not here]
        told, now = set(self._told), dict.fromkeys(self.findable())
        self._told = list(now)
        # Also of what came and went since: fronts expect it of requests that they have sent. And of
        # what went and came: a front that has connected in between knows it as gone.
        moved = {*gone, *changed}
        added = [digest for digest in now if digest not in told or digest in moved]
        evicted = [digest for digest, here in changed.items() if not here]
        removed = dict.fromkeys((*told, *gone, *evicted))
        return False, added, [digest for digest in removed if digest not in now]

    def validate(self, expected: Mapping[int, int]) -> None:
        """Raise AssertionError unless the references are exactly `expected` (block -> count)."""
        for block, count in enumerate(self._references):
            assert count == expected.get(block, 0), (block, count, expected.get(block, 0))
        held = {block for block, count in enumerate(self._references) if count}
        places = [*held, *self._cached, *self._empty]
        assert sorted(places) == list(range(self.num_blocks)), "a block is lost or duplicated"
        assert {d: b for b, d in self._digest_of.items()} == self._by_digest
        assert set(self._cached) <= set(self._digest_of)
        assert not set(self._empty) & set(self._digest_of)
        twins = {block: digest for digest, blocks in self._twins.items() for block in blocks}
        assert twins == self._twin_of
        for block, digest in twins.items():
            assert block in held
            assert block not in self._digest_of
            assert self._by_digest[digest] in held, "a free block keeps its name from a held one"
        if self.states is not None:
            self.states.validate()


class HostPool:
    """Host-memory blocks for swapped KV: each has one owner, so a free list is enough."""

    __slots__ = ("_free", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.reset()

    def reset(self) -> None:
        self._free = list(range(self.num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        if num_blocks > len(self._free):
            raise MemoryError(f"{num_blocks} host blocks asked for, {len(self._free)} free")
        return [self._free.pop() for _ in range(num_blocks)]

    def free(self, blocks: Sequence[int]) -> None:
        self._free.extend(reversed(blocks))

    def validate(self, held: Sequence[int]) -> None:
        """Raise AssertionError unless exactly `held` blocks are out."""
        assert sorted([*held, *self._free]) == list(range(self.num_blocks))
