"""Blocks go from the cache to the store and back as they were, whatever backend laid them out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.scheduling.events import ClearTier, Fetch, Save
from actors.stage import kv_mover
from actors.stage.kv import KVCache
from actors.stage.kv_mover import KVMover
from actors.stage.spec import TierSpec
from actors.stage.tier import shared
from actors.stage.tier.direct import DeviceBlocks
from kernels.interface import AttentionShape
from kernels.registry import resolve_backend

BLOCKS, BLOCK_SIZE = 6, 4
SHAPE, WIDE = AttentionShape(4, 2, 16, 0.25), AttentionShape(4, 1, 40, 0.25)
CPU = torch.device("cpu")


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


@pytest.fixture(
    params=[
        ("torch", None, SHAPE),
        ("cpu", None, SHAPE),
        ("cpu", torch.int8, SHAPE),
        ("cpu", torch.int8, WIDE),
    ],
    ids=str,
)
def cache(request: pytest.FixtureRequest) -> KVCache:
    """Every block different, in every layer; the second layer may be of a shape of its own."""
    name, narrow, second = request.param
    shapes = [SHAPE, second, SHAPE]
    dtype = torch.bfloat16
    kind = "int8" if narrow else None
    backend = resolve_backend(name, CPU, dtype, BLOCK_SIZE, kind)
    made = KVCache(backend, shapes, BLOCKS, 0, BLOCK_SIZE, narrow or dtype, CPU)
    generator = torch.Generator().manual_seed(1)
    for block in range(BLOCKS):
        for layer in made.layers:
            like = backend.read_block(layer, block)
            drawn = torch.randint(0, 100, like.shape, generator=generator)
            backend.write_blocks([layer], [block], [drawn.to(like.dtype)[None]])
    return made


@pytest.fixture
def make_mover(tmp_path: Path) -> Callable[..., KVMover]:
    def make(cache: KVCache, **changes: Any) -> KVMover:
        spec = TierSpec("this model", str(tmp_path / "kv"), 1 << 20, 1 << 20)
        return KVMover(replace(spec, **changes), cache, "cpu")

    return make


def test_what_was_saved_comes_back(cache: KVCache, make_mover: Callable[..., KVMover]) -> None:
    mover = make_mover(cache)
    before = [cache.read(block) for block in range(BLOCKS)]
    assert len({bytes(content) for content in before}) == BLOCKS
    assert {len(content) for content in before} == {cache.block_bytes}
    assert mover.save([(1, digest(1)), (2, digest(2))]) == 2
    assert mover.changes().added == (digest(1), digest(2))
    assert mover.fetch([(5, digest(1)), (0, digest(2)), (3, digest(9))], 30.0) == 2
    after = [cache.read(block) for block in range(BLOCKS)]
    assert after == [before[2], *before[1:5], before[1]]


def test_blocks_for_which_there_is_no_room_do_not_count_as_saved(
    cache: KVCache,
    make_mover: Callable[..., KVMover],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """All shares of a node together have left little room; there is no other place."""
    shares = {"shared_root": str(tmp_path / "s"), "shared_folder": str(tmp_path / "s/m/r")}
    mover = make_mover(cache, host_bytes=0, disk_bytes=0, **shares, shared_bytes=1 << 20)
    assert mover.save([(1, digest(1))]) == 1
    monkeypatch.setattr(shared, "LEAST_FREE_BYTES", 1 << 60)
    assert mover.save([(1, digest(1)), (2, digest(2)), (3, digest(3))]) == 1
    assert mover.changes().added == (digest(1),)


def test_bounds_that_hold_no_block_are_refused(
    cache: KVCache, make_mover: Callable[..., KVMover], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"^kv\.host_cache_gib: "):
        make_mover(cache, host_bytes=cache.block_bytes - 1)
    with pytest.raises(ValueError, match=r"^kv\.disk_cache_gib: "):
        make_mover(cache, disk_bytes=cache.block_bytes)
    (tmp_path / "file").write_text("")
    shares = {"shared_root": str(tmp_path / "s"), "shared_folder": str(tmp_path / "s/m/r")}
    with pytest.raises(ValueError, match=r"^kv\.shared_cache_gib: the file of a block"):
        make_mover(cache, **shares, shared_bytes=cache.block_bytes)
    with pytest.raises(ValueError, match=r"^kv\.shared_cache_gib: .* has room for"):
        make_mover(cache, **shares, shared_bytes=1 << 60)
    with pytest.raises(ValueError, match=r"^kv\.shared_cache_path: "):
        make_mover(cache, shared_root=str(tmp_path / "file"), shared_bytes=1 << 20)
    with pytest.raises(ValueError, match=r"^kv\.disk_cache_path: "):
        make_mover(cache, folder=str(tmp_path / "file"))
    without = make_mover(cache, folder=str(tmp_path / "file"), is_first_start=False)
    without.save([(1, digest(1))])
    assert without.fetch([(2, digest(1))], 30.0) == 1


def test_all_that_is_stored_is_deleted(cache: KVCache, make_mover: Callable[..., KVMover]) -> None:
    for changes in ({}, {"host_bytes": 0}, {"disk_bytes": 0}):
        mover = make_mover(cache, **changes)
        blocks = tuple((n, digest(n)) for n in (1, 2, 3))
        assert mover.carry_out(Save(1, blocks)) == 3
        assert mover.changes().added == tuple(digest(n) for n in (1, 2, 3))
        assert mover.carry_out(ClearTier(2)) == 0
        assert mover.changes().removed == tuple(digest(n) for n in (1, 2, 3))
        assert mover.carry_out(Fetch(3, blocks, 30.0)) == 0
        assert mover.carry_out(Save(4, blocks)) == 3, "there is room again"
        assert mover.carry_out(Fetch(5, blocks, 30.0)) == 3
        mover.carry_out(ClearTier(6))


def test_a_peer_fetches_what_was_saved(
    cache: KVCache, make_mover: Callable[..., KVMover], tmp_path: Path
) -> None:
    root = tmp_path / "shares"
    shares = {"shared_root": str(root), "shared_folder": str(root / "m/rank")}
    one, other = (
        make_mover(cache, host_bytes=0, disk_bytes=0, shared_bytes=1 << 20, **shares)
        for _ in range(2)
    )
    before = cache.read(1)
    one.save([(1, digest(1))])
    assert other.fetch([(2, digest(1)), (3, digest(2))], 30.0) == 1
    assert cache.read(2) == before
    assert other.changes().added == (digest(1),)


@dataclass
class Way:
    """To devices whose blocks are in `others`, two at once."""

    blocks: DeviceBlocks
    others: list[DeviceBlocks] = field(default_factory=list)
    limits_s: list[float] = field(default_factory=list)

    @property
    def peers(self) -> Way:
        return self

    def load(self, digests: Sequence[bytes], deadline_s: float) -> Iterator[torch.Tensor]:
        self.limits_s.append(deadline_s - time.monotonic())
        for other in self.others:
            for at in range(0, len(digests), 2):
                with other.lent(digests[at : at + 2]) as places:
                    if places:
                        yield torch.stack(places)
                    if len(places) < 2:
                        return


def test_blocks_come_from_other_devices_and_the_rest_from_the_store(
    cache: KVCache,
    make_mover: Callable[..., KVMover],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ways: list[Way] = []

    def make_way(spec: TierSpec, of: KVCache, device: torch.device) -> Way:
        num_places = spec.direct_bytes // of.block_bytes
        ways.append(Way(DeviceBlocks(of.device_places(num_places))))
        return ways[-1]

    monkeypatch.setattr(kv_mover, "direct_way", make_way)
    with pytest.raises(ValueError, match=r"^kv\.direct_gib: two blocks take"):
        make_mover(cache, direct_bytes=2 * cache.block_bytes - 1)
    shares = {"shared_root": str(tmp_path / "s"), "shared_folder": str(tmp_path / "s/m/r")}
    most = {"host_bytes": 0, "disk_bytes": 0, "shared_bytes": 1 << 20, **shares}
    one, other = (make_mover(cache, **most, direct_bytes=3 * cache.block_bytes) for _ in range(2))
    ways[1].others.append(ways[0].blocks)

    before = [cache.read(block) for block in range(BLOCKS)]
    one.save([(n, digest(n)) for n in range(4)])  # the first stays longest, and 3 came first
    replaced: list[int] = []
    cache.on_write = replaced.append
    fetched = other.fetch([(5, digest(0)), (4, digest(1)), (3, digest(2)), (2, digest(3))], 30.0)
    assert fetched == 4
    assert [cache.read(block) for block in (5, 4, 3, 2)] == before[:4]
    assert replaced == [5, 4, 3, 2]
    change = other.changes()
    assert change.num_direct == 3
    assert change.added == tuple(digest(n) for n in range(4)), "shared: none need be saved"
    assert 0 < ways[1].limits_s[0] < 10, "a peer that stands still leaves time for the share"
    assert other.changes().num_direct == 0

    assert one.fetch([(5, digest(1))], 30.0) == 1, "its own"
    assert one.changes().num_direct == 0
