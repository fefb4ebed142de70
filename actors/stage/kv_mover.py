"""KV blocks between one rank's cache, its store and other engines' devices, beside the steps.

No step uses a block until its move has been answered, so this thread and the computing one never
wait for each other.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from actors.scheduling.events import Fetch, KVMove, Save, TierChange
from actors.stage.kv import KVCache
from actors.stage.kv_peers import DirectWay, direct_way, of_this_node, remote_shares
from actors.stage.spec import TierSpec
from actors.stage.tier.disk import DiskTier
from actors.stage.tier.shared import SharedTier
from actors.stage.tier.store import BlockStore
from actors.transport.shares import make_private, remove_unheld
from kernels.upload import SideStream

logger = logging.getLogger("legato.tier")

# Of a fetch's time for other devices: a peer that stands still leaves the rest to the share.
_DIRECT_SHARE = 0.25

Blocks = Sequence[tuple[int, bytes]]  # (device block, digest)


def _open_disk(spec: TierSpec, block_bytes: int) -> DiskTier | None:
    try:
        disk = DiskTier(Path(spec.folder), spec.key, block_bytes, spec.disk_bytes)
    except OSError as error:
        if spec.is_first_start:
            raise ValueError(f"kv.disk_cache_path: {error}") from error
        logger.error("KV is not kept on disk: %s", error)
        return None
    if not disk.most:
        raise ValueError(f"kv.disk_cache_gib: the file of a block takes {disk.file_bytes} bytes")
    return disk


def _open_shared(spec: TierSpec, block_bytes: int) -> SharedTier | None:
    root = Path(spec.shared_root)
    try:
        make_private(root)
        if spec.is_first_start:  # later ones keep the share of the rank that they replace
            remove_unheld(root)
        space = os.statvfs(root)
        shared = SharedTier(Path(spec.shared_folder), spec.key, block_bytes, spec.shared_bytes)
    except OSError as error:
        if spec.is_first_start:
            raise ValueError(f"kv.shared_cache_path: {error}") from error
        logger.error("KV is not shared: %s", error)
        return None
    if not shared.most:
        raise ValueError(
            f"kv.shared_cache_gib: the file of a block takes {shared.file_bytes} bytes"
        )
    free_bytes = space.f_bavail * space.f_frsize
    if spec.is_first_start and free_bytes < spec.shared_bytes:  # more would end others by SIGBUS
        raise ValueError(f"kv.shared_cache_gib: {root} has room for {free_bytes} bytes")
    return shared


class KVMover:
    """One thread calls `carry_out`. Raises ValueError naming the setting that cannot be."""

    def __init__(self, spec: TierSpec, cache: KVCache, device: str) -> None:
        self._cache = cache
        if 0 < spec.host_bytes < cache.block_bytes:
            raise ValueError(f"kv.host_cache_gib: a block takes {cache.block_bytes} bytes")
        disk = _open_disk(spec, cache.block_bytes) if spec.disk_bytes else None
        shared, remote = None, None
        if spec.shared_bytes:
            spec = of_this_node(spec) if spec.between_nodes is not False else spec
            shared = _open_shared(spec, cache.block_bytes)
        if shared is not None and spec.between_nodes:
            remote = remote_shares(spec, shared)
        self._direct: DirectWay | None = None
        if 0 < spec.direct_bytes < 2 * cache.block_bytes:
            raise ValueError(f"kv.direct_gib: two blocks take {2 * cache.block_bytes} bytes")
        if spec.direct_bytes:
            self._direct = direct_way(spec, cache, torch.device(device))
        self._num_direct = 0
        self._store = BlockStore(cache.block_bytes, spec.host_bytes, disk, shared, remote)
        self._stream = SideStream(torch.device(device))

    def held(self) -> tuple[bytes, ...]:
        """Digests of the blocks that an earlier engine has left."""
        return tuple(self._store.held())

    def changes(self) -> TierChange:
        """Digests added and removed since the last call."""
        added, removed = self._store.pop_changes()
        num_direct, self._num_direct = self._num_direct, 0
        return TierChange(tuple(added), tuple(removed), num_direct)

    def carry_out(self, move: KVMove) -> int:
        """Returns how many of the blocks were kept, or came, from the first."""
        if isinstance(move, Save):
            return self.save(move.blocks)
        if isinstance(move, Fetch):
            return self.fetch(move.blocks, move.limit_s)
        self.clear()
        return 0

    def clear(self) -> None:
        """Delete what is stored, and what other devices find."""
        self._store.clear()
        if self._direct is not None:
            self._direct.blocks.clear()

    @torch.inference_mode()
    def save(self, blocks: Blocks) -> int:
        """Copy these into the store, which forgets a chain from its tail, and where other devices
        find them, where the oldest gives way; returns how many the store has kept."""
        num_kept = 0
        with self._stream.apart():
            for block, digest in reversed(blocks):
                num_kept += self._store.save(digest, self._cache.read(block))
                if self._direct is not None:
                    self._direct.blocks.put(digest, partial(self._cache.copy_out, block))
        return num_kept

    @torch.inference_mode()
    def fetch(self, blocks: Blocks, limit_s: float) -> int:
        """Fill these from other devices and from the store, up to the first that is absent or late;
        returns how many."""
        now_s = time.monotonic()
        deadline_s, direct_until_s = now_s + limit_s, now_s + _DIRECT_SHARE * limit_s
        count = 0
        with self._stream.apart():
            while count < len(blocks):
                before = count
                count += self._fetch_direct(blocks[count:], direct_until_s)
                count += self._fetch_stored(blocks[count:], deadline_s)
                if count == before:
                    break
        return count

    def _fetch_direct(self, blocks: Blocks, deadline_s: float) -> int:
        count = 0
        if self._direct is None or self._store.holds(blocks[0][1]):
            return count
        for places in self._direct.peers.load([digest for _, digest in blocks], deadline_s):
            numbers = [block for block, _ in blocks[count : count + len(places)]]
            self._cache.copy_in(numbers, places)
            count += len(places)
        self._num_direct += count
        self._store.take_over([digest for _, digest in blocks[:count]])
        return count

    def _fetch_stored(self, blocks: Blocks, deadline_s: float) -> int:
        count = 0
        limit_s = max(0.0, deadline_s - time.monotonic())
        loaded = self._store.load([digest for _, digest in blocks], limit_s)
        for (block, _), content in zip(blocks, loaded, strict=False):
            self._cache.write(block, content)
            count += 1
        return count
