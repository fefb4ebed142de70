"""The KV cache's memory of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actors.scheduling.plan import StepPlan
from actors.stage import kv
from actors.stage.kv import KVCache, blocks_of_part
from kernels.interface import AttentionShape, KVLayer
from kernels.registry import resolve_backend
from kernels.torch.attention import TorchKVLayer
from kernels.torch.backend import TorchBackend

SHAPE, WIDE = AttentionShape(4, 2, 16, 0.25), AttentionShape(4, 1, 40, 0.25)
CPU = torch.device("cpu")


def test_host_memory_that_is_not_there_is_refused_by_its_setting() -> None:
    most = 1 << 40  # blocks: above what any machine lends
    with pytest.raises(ValueError, match=r"^kv\.swap_gib: .*allocate"):
        KVCache(TorchBackend(), [SHAPE] * 2, 3, most, 4, torch.float32, CPU)


def test_a_cache_that_does_not_fit_is_refused_by_its_setting() -> None:
    most = 1 << 40
    with pytest.raises(ValueError, match=r"^kv\.memory_gib, kv\.memory_fraction: .*allocate"):
        KVCache(TorchBackend(), [SHAPE] * 2, most, 3, 4, torch.float32, CPU)


class FailingBackend(TorchBackend):
    """Of a GPU, which this machine need not have."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def allocate_kv(self, *sizes: Any) -> list[KVLayer]:
        raise self._error


def test_of_a_gpu_only_want_of_memory_is_blamed_on_the_size_of_the_cache() -> None:
    """Its backend also compiles and runs kernels while it makes the cache."""
    gpu = torch.device("cuda")
    full = torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")
    with pytest.raises(ValueError, match=r"^kv\.memory_gib, kv\.memory_fraction: .*of memory\.$"):
        KVCache(FailingBackend(full), [SHAPE], 3, 0, 4, torch.float32, gpu)
    with pytest.raises(ValueError, match=r"memory_fraction: OutOfMemoryError$"):  # without a word
        KVCache(FailingBackend(torch.OutOfMemoryError()), [SHAPE], 3, 0, 4, torch.float32, gpu)
    for error in (RuntimeError("CUDA error: no kernel image"), OSError("no compiler")):
        with pytest.raises(type(error), match=f"^{error}$"):
            KVCache(FailingBackend(error), [SHAPE], 3, 0, 4, torch.float32, gpu)


@pytest.mark.parametrize("block_bytes", [1 << 21, 7 << 18, 3 << 29])
@pytest.mark.parametrize("gib", [4, 5, 20])
def test_pinned_memory_is_little_more_than_was_asked_for(block_bytes: int, gib: int) -> None:
    num_blocks = (gib << 30) // block_bytes
    step = blocks_of_part(num_blocks, block_bytes, are_pinned=True)
    sizes = [min(step, num_blocks - i) * block_bytes for i in range(0, num_blocks, step)]
    pinned = sum(1 << (size - 1).bit_length() for size in sizes)
    assert pinned <= (gib + 0.5) * 2**30 or step == 1


@pytest.mark.parametrize("shapes", [[SHAPE] * 2, [SHAPE, WIDE]], ids=["one", "two_shapes"])
def test_host_blocks_of_several_parts_come_back(
    monkeypatch: pytest.MonkeyPatch, shapes: list[AttentionShape]
) -> None:
    monkeypatch.setattr(kv, "blocks_of_part", lambda *arguments: 2)
    cache = KVCache(TorchBackend(), shapes, 5, 5, 4, torch.float32, CPU)
    stored = stored_in(cache)
    before = [part.normal_().clone() for part in stored]
    cache.transfer(StepPlan(0, (), swap_out=tuple((b, 4 - b) for b in range(5))))
    for part in stored:
        part.zero_()
    cache.transfer(StepPlan(1, (), swap_in=tuple((4 - b, b) for b in range(5))))
    assert len(stored) == 4
    assert all(map(torch.equal, stored, before))


def stored_in(cache: KVCache) -> list[torch.Tensor]:
    return [
        part for x in cache.layers if isinstance(x, TorchKVLayer) for part in (x.keys, x.values)
    ]


@pytest.mark.parametrize("name", ["torch", "cpu"])
def test_layers_of_two_shapes_keep_their_order_and_share_blocks(name: str) -> None:
    """Copies, bytes on the host and places on the device have all layers."""
    backend = resolve_backend(name, "cpu", torch.bfloat16, 4, None)
    shapes = [SHAPE, WIDE, SHAPE, WIDE, WIDE]
    cache = KVCache(backend, shapes, 3, 0, 4, torch.bfloat16, CPU)
    sizes = [backend.kv_block_bytes(4, shape, torch.bfloat16) for shape in shapes]
    assert cache.block_bytes == sum(sizes)
    assert [backend.read_block(layer, 0).nbytes for layer in cache.layers] == sizes
    assert sizes[0] != sizes[1]
    cache.write(0, bytearray(i % 251 for i in range(cache.block_bytes)))
    cache.transfer(StepPlan(0, (), copies=((0, 1),)))
    place = cache.device_places(1)
    cache.copy_out(1, place[0])
    cache.copy_in([2], place)
    assert cache.read(0) == cache.read(1) == cache.read(2)
    cache.wait_for_memory(60)


def test_blocks_of_layers_of_one_shape_are_their_bytes_one_after_the_other() -> None:
    """On disk and between engines."""
    backend = TorchBackend()
    cache = KVCache(backend, [SHAPE] * 2, 2, 0, 4, torch.float32, CPU)
    for part in stored_in(cache):
        part.normal_()
    layers = [backend.read_block(layer, 1).numpy().tobytes() for layer in cache.layers]
    assert bytes(cache.read(1)) == b"".join(layers)
