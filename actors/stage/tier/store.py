"""The second tier of the prefix cache: a block's bytes by the digest of its content.

Host memory above disk. A saved block is in host memory at once, and a thread writes it to disk; a
block read from disk is kept in host memory again. Memory shared with the engines of a node is
beside both: a saved block is there when `save` returns, so that a peer can be told. What is not on
this node is asked of the ranks of others (`remote`). A block that is missing, damaged or late
counts as absent.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import islice
from typing import Protocol

Block = bytearray

# Memory of blocks that wait to be written; blocks saved while it is full are not written to disk.
_BACKLOG_BYTES = 256 << 20
_MOST_AHEAD = 8  # blocks that are read before they are asked for: they are in memory meanwhile


class Disk(Protocol):
    """See `disk.DiskTier`."""

    def held(self) -> list[bytes]: ...
    def __contains__(self, digest: bytes) -> bool: ...
    def put(self, digest: bytes, block: Block) -> bool: ...
    def get(self, digest: bytes) -> bytearray | None: ...
    def used(self, digests: Iterable[bytes]) -> None: ...
    def pop_lost(self) -> list[bytes]: ...
    def clear(self) -> None: ...
    def close(self) -> None: ...


class Shared(Disk, Protocol):
    """See `shared.SharedTier`."""

    def put(self, digest: bytes, block: Block, spared: Collection[bytes] = ()) -> bool: ...
    def find(self, digest: bytes, spared: Collection[bytes] = ()) -> bool: ...
    def checked(self, digest: bytes, content: bytearray) -> bytearray | None: ...


class Remote(Protocol):
    """See `remote.RemoteShares`."""

    def load(
        self, digests: Sequence[bytes], deadline_s: float
    ) -> Generator[bytearray, None, None]: ...
    def close(self) -> None: ...


class BlockStore:
    """Blocks of `block_bytes` each; at most `host_bytes` of them in memory, `disk`'s bound there
    and `shared`'s in shared memory. What `remote` finds is kept in `shared` too.

    Called by one thread. `pop_changes` returns added and removed digests, losses of the disk
    included, so that the caller does not rely on lost blocks.
    """

    def __init__(
        self,
        block_bytes: int,
        host_bytes: int,
        disk: Disk | None = None,
        shared: Shared | None = None,
        remote: Remote | None = None,
    ) -> None:
        self._most_in_host = host_bytes // block_bytes
        self._most_in_backlog = max(1, _BACKLOG_BYTES // block_bytes)
        self._disk = disk
        self._shared = shared
        self._remote = remote
        self._lock = threading.Lock()
        self._host: OrderedDict[bytes, Block] = OrderedDict()  # the longest unused first
        self._backlog: OrderedDict[bytes, Block] = OrderedDict()  # to be written, oldest first
        below = [tier for tier in (disk, shared) if tier is not None]
        self._reported = {d for tier in below for d in tier.held()}  # as reported to the caller
        self._gone: set[bytes] = set()  # possibly removed since the last `pop_changes`
        self._is_closed = False
        self._wakes = threading.Condition(self._lock)
        self._reader: ThreadPoolExecutor | None = None
        if below:
            self._reader = ThreadPoolExecutor(1, "legato-tier-read")
        if disk is not None:
            self._writer = threading.Thread(target=self._write, name="legato-tier-write")
            self._writer.daemon = True
            self._writer.start()

    def held(self) -> list[bytes]:
        """Digests of all blocks, at the start: later ones come by `pop_changes`."""
        return sorted(self._reported)

    def save(self, digest: bytes, block: Block) -> bool:
        """Keep a block, which the caller must not change afterwards; returns whether there is room:
        shares of a node may have none, and what waits for the disk is bounded."""
        if self._shared is not None and digest not in self._shared:
            self._shared.put(digest, block)
        with self._lock:
            self._keep_in_host(digest, block)
            has_room = len(self._backlog) < self._most_in_backlog
            if self._disk is not None and has_room and digest not in self._disk:
                self._backlog.setdefault(digest, block)
                self._wakes.notify()
            self._gone.add(digest)  # to be reported
            return self._holds(digest)

    def load(self, digests: Sequence[bytes], limit_s: float) -> Iterator[Block]:
        """The blocks in this order, up to the first that is absent or not here in time.

        Reading is a little ahead of the caller. limit_s: for all of them together.
        """
        deadline_s = time.monotonic() + limit_s
        chain = frozenset(digests)  # no block of it gives way to another
        self._used_in_host(digests)
        count = 0
        try:
            while count < len(digests):
                before = count
                for block in self._load_here(digests[count:], chain, deadline_s):
                    count += 1
                    yield block
                for block in self._load_elsewhere(digests[count:], chain, deadline_s):
                    count += 1
                    yield block
                if count == before:
                    return
        finally:
            self._used(digests[:count])

    def _load_elsewhere(
        self, digests: Sequence[bytes], chain: Collection[bytes], deadline_s: float
    ) -> Iterator[Block]:
        """Blocks of other nodes."""
        if self._remote is None or self._shared is None or not digests:
            return
        with closing(self._remote.load(digests, deadline_s)) as contents:
            for digest, content in zip(digests, contents, strict=False):
                block = self._shared.checked(digest, content)
                if block is None:
                    return
                is_kept = self._shared.put(digest, block, chain)
                with self._lock:
                    if not is_kept:
                        self._keep_in_host(digest, block, chain)
                    self._gone.add(digest)  # to be reported
                yield block

    def _load_here(
        self, digests: Sequence[bytes], chain: Collection[bytes], deadline_s: float
    ) -> Iterator[Block]:
        left = iter(digests)
        ahead: deque[tuple[bytes, Block | Future[Block | None]]] = deque()
        try:
            while True:
                for digest in islice(left, _MOST_AHEAD - len(ahead)):
                    begun = self._begin(digest, chain)
                    if begun is None:
                        left = iter(())
                        break
                    ahead.append((digest, begun))
                if not ahead:
                    return
                digest, found = ahead.popleft()
                if isinstance(found, Future):
                    block = found.result(max(0.0, deadline_s - time.monotonic()))
                    if block is None:
                        return
                    with self._lock:
                        if self._shared is None or digest not in self._shared:
                            self._keep_in_host(digest, block, chain)
                        self._gone.add(digest)
                    found = block
                yield found
        except TimeoutError:
            return
        finally:
            for _, waits in ahead:
                if isinstance(waits, Future):
                    waits.cancel()

    def _begin(
        self, digest: bytes, chain: Collection[bytes]
    ) -> Block | Future[Block | None] | None:
        """A block that is here: it, or what reads it."""
        block = self._in_memory(digest)
        if block is not None or self._reader is None:
            return block
        if self._shared is not None and self._shared.find(digest, chain):
            return self._reader.submit(self._shared.get, digest)
        if self._disk is not None and digest in self._disk:
            return self._reader.submit(self._disk.get, digest)
        return None

    def pop_changes(self) -> tuple[list[bytes], list[bytes]]:
        """(digests added since the last call, digests removed)."""
        with self._lock:
            suspects, self._gone = self._gone, set()
            for tier in (self._disk, self._shared):
                if tier is not None:
                    suspects.update(tier.pop_lost())
            here = {digest for digest in suspects if self._holds(digest)}
        added, removed = here - self._reported, (suspects - here) & self._reported
        self._reported = (self._reported | added) - removed
        return sorted(added), sorted(removed)

    def take_over(self, digests: Sequence[bytes]) -> None:
        """These are on the device: keep what a peer shares of them, which copies nothing, so that
        they need not be saved."""
        found = [d for d in reversed(digests) if self._shared is not None and self._shared.find(d)]
        with self._lock:
            self._gone.update(found)  # to be reported

    def holds(self, digest: bytes) -> bool:
        """Whether this rank has it, in memory or on disk."""
        with self._lock:
            return self._holds(digest)

    def clear(self) -> None:
        """Delete all blocks; what peers share stays theirs."""
        with self._wakes:
            self._gone.update(self._host, self._backlog)
            self._host.clear()
            for digest in list(self._backlog)[1:]:  # the first may be being written
                del self._backlog[digest]
            self._wakes.wait_for(lambda: not self._backlog or self._is_closed)
        for tier in (self._disk, self._shared):
            if tier is not None:
                tier.clear()

    def flush(self, limit_s: float) -> bool:
        """Wait until all is written; returns whether it is."""
        with self._wakes:
            return self._wakes.wait_for(lambda: not self._backlog, limit_s)

    def close(self) -> None:
        """Stop; blocks that are not yet written are lost."""
        with self._lock:
            self._is_closed = True
            self._wakes.notify_all()
        if self._reader is not None:
            self._reader.shutdown(wait=False, cancel_futures=True)
        if self._disk is not None:
            self._writer.join(10.0)
            self._disk.close()
        if self._shared is not None:
            self._shared.close()
        if self._remote is not None:
            self._remote.close()

    # ---- memory -------------------------------------------------------------------------------

    def _in_memory(self, digest: bytes) -> Block | None:
        with self._lock:
            return self._host.get(digest) or self._backlog.get(digest)

    def _used(self, digests: Sequence[bytes]) -> None:
        """A chain's tail is of no use without its head, so the head counts as used last."""
        self._used_in_host(digests)
        for tier in (self._disk, self._shared):
            if self._reader is not None and tier is not None:
                self._reader.submit(tier.used, tuple(reversed(digests)))

    def _used_in_host(self, digests: Sequence[bytes]) -> None:
        with self._lock:
            for digest in reversed(digests):
                if digest in self._host:
                    self._host.move_to_end(digest)

    def _keep_in_host(self, digest: bytes, block: Block, spared: Collection[bytes] = ()) -> None:
        """spared: give it up rather than one of these, which have been used last."""
        if self._most_in_host < 1:
            return
        self._host[digest] = block
        self._host.move_to_end(digest)
        while len(self._host) > self._most_in_host:
            oldest = next(iter(self._host))
            gone = digest if oldest in spared else oldest
            del self._host[gone]
            self._gone.add(gone)

    def _holds(self, digest: bytes) -> bool:
        if digest in self._host or digest in self._backlog:
            return True
        return any(tier is not None and digest in tier for tier in (self._disk, self._shared))

    # ---- the writer's thread --------------------------------------------------------------------

    def _write(self) -> None:
        """One block after another; files are written with the interpreter's lock released."""
        assert self._disk is not None
        with suppress(OSError):  # steps come first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
        while True:
            with self._wakes:
                self._wakes.wait_for(lambda: bool(self._backlog) or self._is_closed)
                if self._is_closed:
                    return
                digest, block = next(iter(self._backlog.items()))
            self._disk.put(digest, block)
            with self._wakes:
                del self._backlog[digest]
                self._gone.add(digest)  # possibly lost: to be reported
                self._wakes.notify_all()
