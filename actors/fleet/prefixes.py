"""Which engine holds which prefix, as seen by a front: KV block by block or, of a model whose
layers keep states, the states at the end of some blocks, each with all before it.

It has two sources. The blocks of a request are expected when it is sent, because they will be
cached before the next request arrives. An engine's updates confirm them, and add what the front
cannot see: outputs, evictions, and requests of other fronts. A wrong entry costs a recomputation,
never a wrong token. What is only expected is bounded, and forgotten with a request that its engine
has not begun.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from actors.fleet.snapshot import PrefixUpdate


class PrefixIndex:
    """Digest -> the engines that hold it, as bits of an integer, so that one pass over a prompt's
    digests finds the hits of all engines."""

    def __init__(self) -> None:
        self._bit: dict[str, int] = {}  # engine -> its bit
        self._free_bits: list[int] = []  # of engines that left
        self._with_states = 0  # bits of the engines that hold states
        self._holders: dict[bytes, int] = {}  # never 0
        self._held: dict[str, set[bytes]] = {}  # the inverse
        # Of those, engine -> what it has not confirmed, and of how many requests; the oldest first.
        self._expected: dict[str, dict[bytes, int]] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def holds_states(self, engine_id: str) -> None:
        """What this engine holds is a hit with all before it, or none."""
        self._with_states |= self._of(engine_id)

    def note(self, engine_id: str, digests: Iterable[bytes]) -> None:
        """The engine holds these."""
        bit, held, holders = self._of(engine_id), self._held[engine_id], self._holders
        expected = self._expected[engine_id]
        for digest in digests:
            expected.pop(digest, None)
            held.add(digest)
            holders[digest] = holders.get(digest, 0) | bit

    def expect(self, engine_id: str, digests: Iterable[bytes], most: int) -> None:
        """The engine will hold these once it has computed a request that was sent to it. most: so
        many are expected of it at once."""
        bit, held, holders = self._of(engine_id), self._held[engine_id], self._holders
        expected = self._expected[engine_id]
        for digest in digests:
            if digest not in held or digest in expected:
                expected[digest] = expected.pop(digest, 0) + 1
                held.add(digest)
                holders[digest] = holders.get(digest, 0) | bit
        self.drop(engine_id, list(islice(expected, max(0, len(expected) - most))))

    def retract(self, engine_id: str, digests: Iterable[bytes]) -> None:
        """A request of these blocks is no longer to come, or not to be computed, there."""
        if engine_id not in self._expected:  # it has left
            return
        expected, gone = self._expected[engine_id], []
        for digest in digests:
            if (number := expected.get(digest, 0)) > 1:
                expected[digest] = number - 1
            elif number:
                gone.append(digest)
        self.drop(engine_id, gone)

    def drop(self, engine_id: str, digests: Iterable[bytes]) -> None:
        """The engine has evicted these."""
        bit, held, holders = self._of(engine_id), self._held[engine_id], self._holders
        expected = self._expected[engine_id]
        for digest in digests:
            if digest not in held:
                continue
            expected.pop(digest, None)
            held.discard(digest)
            left = holders[digest] & ~bit
            if left:
                holders[digest] = left
            else:
                del holders[digest]

    def apply(self, update: PrefixUpdate) -> None:
        if update.whole:
            self.drop(update.engine_id, tuple(self._held.get(update.engine_id, ())))
        self.drop(update.engine_id, update.removed)
        self.note(update.engine_id, update.added)

    def forget(self, engine_id: str) -> None:
        """Remove the engine and all its entries."""
        if engine_id in self._bit:
            self.drop(engine_id, tuple(self._held[engine_id]))
            del self._held[engine_id], self._expected[engine_id]
            self._with_states &= ~self._bit[engine_id]
            self._free_bits.append(self._bit.pop(engine_id))

    def num_held(self, engine_id: str) -> int:
        return len(self._held.get(engine_id, ()))

    def hits(self, prefix: Sequence[bytes]) -> dict[str, int]:
        """Engine -> behind how many leading blocks of `prefix` a request can begin there; engines
        with none are left out.

        >>> index = PrefixIndex()
        >>> index.note("a", [b"1", b"2"]); index.note("b", [b"1", b"3"])
        >>> sorted(index.hits([b"1", b"2", b"3"]).items())
        [('a', 2), ('b', 1)]
        """
        found: dict[int, int] = {}  # leading blocks held -> bits of these engines
        holders, left = self._holders, ~self._with_states
        count = 0
        for digest in prefix:
            still = left & holders.get(digest, 0)
            if still != left and count:
                found[count] = left & ~still
            left = still
            if not left:
                break
            count += 1
        if left and count:
            found[count] = left
        left, count = self._with_states, len(prefix)
        while left and count:
            if here := left & holders.get(prefix[count - 1], 0):
                found[count] = found.get(count, 0) | here
                left &= ~here
            count -= 1
        if not found:
            return {}
        return {
            engine: count
            for engine, bit in self._bit.items()
            for count, bits in found.items()
            if bits & bit
        }

    def _of(self, engine_id: str) -> int:
        bit = self._bit.get(engine_id)
        if bit is None:
            bit = self._free_bits.pop() if self._free_bits else 1 << len(self._bit)
            self._bit[engine_id] = bit
            self._held[engine_id], self._expected[engine_id] = set(), {}
        return bit
