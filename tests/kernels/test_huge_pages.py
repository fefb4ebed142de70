"""Memory on huge pages: zeroed, apart, and as long-lived as the tensors in it."""

from __future__ import annotations

import errno
import gc
import mmap

import pytest
import torch

from kernels.huge_pages import HUGE_PAGE_BYTES, Arena, map_zeros, zeros


def test_a_mapping_is_zero_and_may_be_empty() -> None:
    assert map_zeros(HUGE_PAGE_BYTES + 1).sum() == 0
    assert len(map_zeros(0)) == 0


def test_a_kernel_without_huge_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("mmap.mmap", Small)
    assert map_zeros(HUGE_PAGE_BYTES).sum() == 0


def test_a_tensor_on_a_mapping_may_have_no_elements() -> None:
    for shape in ((3, 5), (3, 0, 5)):
        found = zeros(shape, torch.bfloat16, torch.device("cpu"))
        assert torch.equal(found, torch.zeros(shape, dtype=torch.bfloat16))


def test_tensors_of_an_arena_do_not_overlap() -> None:
    arena = Arena()
    shapes = [(3, 5), (7,), (2, HUGE_PAGE_BYTES), (40, HUGE_PAGE_BYTES), (1, 1)]
    tensors = [arena.zeros(shape, torch.bfloat16) for shape in shapes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number + 1)
    for number, (shape, tensor) in enumerate(zip(shapes, tensors, strict=True)):
        assert tensor.shape == shape
        assert tensor.data_ptr() % 64 == 0
        assert bool((tensor == number + 1).all())


def test_a_tensor_outlives_its_arena() -> None:
    tensor = Arena().zeros((1000,), torch.float32)
    gc.collect()
    tensor += 1
    assert tensor.sum() == 1000
