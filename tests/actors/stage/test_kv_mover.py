"""Blocks go from the cache to the store and back as they were, whatever backend laid them out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.stage.kv import KVCache
from actors.stage.kv_mover import KVMover
from actors.stage.spec import TierSpec
from kernels.interface import AttentionShape
from kernels.registry import resolve_backend

LAYERS, BLOCKS, BLOCK_SIZE = 3, 6, 4
SHAPE = AttentionShape(4, 2, 16, 0.25)
CPU = torch.device("cpu")


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


@pytest.fixture(params=[("torch", None), ("cpu", None), ("cpu", torch.int8)], ids=str)
def cache(request: pytest.FixtureRequest) -> KVCache:
    """Every block different, in every layer."""
    name, narrow = request.param
    dtype = torch.bfloat16
    kind = "int8" if narrow else None
    backend = resolve_backend(name, CPU, dtype, BLOCK_SIZE, kind)
    made = KVCache(backend, LAYERS, BLOCKS, 0, BLOCK_SIZE, SHAPE, narrow or dtype, CPU)
    generator = torch.Generator().manual_seed(1)
    for block in range(BLOCKS):
        for layer in made.layers:
            like = backend.read_block(layer, block)
            drawn = torch.randint(0, 100, like.shape, generator=generator)
            backend.write_block(layer, block, drawn.to(like.dtype))
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
