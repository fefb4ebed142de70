"""Blocks of all layers moved by one launch: copied in the cache, or gathered and scattered.

Blocks on their way to the host or back lie side by side in a buffer on the device, each with all
its layers, so that one transfer moves a block. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.triton.cache import PagedKV
from kernels.upload import upload

_BLOCK = 2048
_BUFFER_BYTES = 32 << 20  # at most, or one block: the cache leaves little memory free


@triton.jit(do_not_specialize=["num_parts"])
def _move_kernel(
    moves_ptr: tl.tensor,
    num_parts: tl.tensor,
    NUM_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    WORD: tl.constexpr,
) -> None:
    # moves: addresses and strides of source and target by part, then both blocks by move.
    move, part = tl.program_id(0), tl.program_id(1)
    part_ptr = moves_ptr + part * 4
    block_ptr = moves_ptr + (num_parts * 4 + move * 2)
    source = tl.load(part_ptr) + tl.load(block_ptr) * tl.load(part_ptr + 2)
    target = tl.load(part_ptr + 1) + tl.load(block_ptr + 1) * tl.load(part_ptr + 3)
    source_ptr = source.to(tl.pointer_type(WORD))
    target_ptr = target.to(tl.pointer_type(WORD))
    for begin in range(0, NUM_WORDS, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        words = tl.load(source_ptr + at, mask=at < NUM_WORDS)
        tl.store(target_ptr + at, words, mask=at < NUM_WORDS)


def copy_blocks(layers: Sequence[PagedKV], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy in order: a later pair may read a block that an earlier one wrote."""
    for together in _independent(pairs):
        addresses = _addresses(layers)
        _launch(layers, addresses, addresses, _block_bytes(layers), _block_bytes(layers), together)


def read_blocks(
    layers: Sequence[PagedKV], blocks: Sequence[int], places: Sequence[torch.Tensor]
) -> None:
    """Each block into its place on the host, (layers, 2, ...)."""
    for few, their_places in _some_at_once(layers, blocks, places):
        buffer = _buffer(layers, len(few))
        pairs = [(block, i) for i, block in enumerate(few)]
        _launch(
            layers, _addresses(layers), _addresses_in(buffer), _block_bytes(layers),
            buffer[0].nbytes, pairs,
        )  # fmt: skip
        for gathered, place in zip(buffer, their_places, strict=True):
            place.copy_(gathered, non_blocking=True)


def write_blocks(
    layers: Sequence[PagedKV], blocks: Sequence[int], places: Sequence[torch.Tensor]
) -> None:
    """Each block from its place on the host."""
    for few, their_places in _some_at_once(layers, blocks, places):
        buffer = _buffer(layers, len(few))
        for gathered, place in zip(buffer, their_places, strict=True):
            gathered.copy_(place, non_blocking=True)
        pairs = list(enumerate(few))
        _launch(
            layers, _addresses_in(buffer), _addresses(layers), buffer[0].nbytes,
            _block_bytes(layers), pairs,
        )  # fmt: skip


def warm(layers: Sequence[PagedKV]) -> None:
    """Compile the kernel ahead of the first copy."""
    copy_blocks(layers, [(0, 0)])


def _some_at_once(
    layers: Sequence[PagedKV], blocks: Sequence[int], places: Sequence[torch.Tensor]
) -> Iterator[tuple[Sequence[int], Sequence[torch.Tensor]]]:
    if layers:
        step = max(1, _BUFFER_BYTES // (2 * len(layers) * _block_bytes(layers)))
        for i in range(0, len(blocks), step):
            yield blocks[i : i + step], places[i : i + step]


def _independent(pairs: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Runs of pairs that may be copied in any order."""
    run: list[tuple[int, int]] = []
    for source, target in pairs:
        touched = {block for pair in run for block in pair}
        if source in {t for _, t in run} or target in touched:
            yield run
            run = []
        run.append((source, target))
    if run:
        yield run


def _block_bytes(layers: Sequence[PagedKV]) -> int:
    """Of K or V of one layer."""
    return layers[0].keys[0].nbytes if layers else 0


def _addresses(layers: Sequence[PagedKV]) -> list[int]:
    """Of block 0 of each part, K and V of layer after layer."""
    return [part.data_ptr() for layer in layers for part in (layer.keys, layer.values)]


def _addresses_in(buffer: torch.Tensor) -> list[int]:
    parts = buffer[0].flatten(0, 1)
    return [part.data_ptr() for part in parts]


def _buffer(layers: Sequence[PagedKV], num_blocks: int) -> torch.Tensor:
    keys = layers[0].keys
    size = (num_blocks, len(layers), 2, *keys.shape[1:])
    return torch.empty(size, dtype=keys.dtype, device=keys.device)


def _launch(
    layers: Sequence[PagedKV],
    sources: Sequence[int],
    targets: Sequence[int],
    source_stride: int,
    target_stride: int,
    pairs: Sequence[tuple[int, int]],
) -> None:
    """sources, targets: addresses of block 0 of each part; strides: bytes from block to block."""
    num_bytes = _block_bytes(layers)
    parts = np.empty((len(sources), 4), dtype=np.int64)
    parts[:, 0], parts[:, 1], parts[:, 2:] = sources, targets, (source_stride, target_stride)
    moves = np.concatenate((parts.ravel(), np.array(pairs, dtype=np.int64).ravel()))
    word, size = (tl.int32, 4) if num_bytes % 16 == 0 else (tl.uint8, 1)
    _move_kernel[(len(pairs), len(parts))](
        upload(moves, layers[0].keys.device), len(parts), NUM_WORDS=num_bytes // size,
        BLOCK=_BLOCK, WORD=word, num_warps=4,
    )  # fmt: skip
