"""Cache blocks from place to place, of all layers in one launch.

The kernel is told addresses: of each layer's keys and values, and of the pinned host memory that a
swap goes to, which a GPU reads and writes itself. So neither waits for the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.interface import Pairs
from kernels.triton.cache import PagedKV
from kernels.upload import upload

_WORD_BYTES = 8
_BLOCK = 1024


@triton.jit(do_not_specialize=["num_parts", "from_stride", "to_stride", "num_words"])
def _copy_kernel(
    listed_ptr: tl.tensor,
    num_parts: tl.tensor,
    from_stride: tl.tensor,
    to_stride: tl.tensor,
    num_words: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """listed: where each part's blocks begin, whence and whither, then the pairs of blocks."""
    pair = tl.program_id(0)
    part = tl.program_id(1)
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    from_ptr = tl.load(listed_ptr + part).to(tl.pointer_type(tl.int64))
    to_ptr = tl.load(listed_ptr + num_parts + part).to(tl.pointer_type(tl.int64))
    source = tl.load(listed_ptr + 2 * num_parts + 2 * pair)
    destination = tl.load(listed_ptr + 2 * num_parts + 2 * pair + 1)
    words = tl.load(from_ptr + source * from_stride + i, mask=i < num_words, other=0)
    tl.store(to_ptr + destination * to_stride + i, words, mask=i < num_words)


def copy_blocks(layers: Sequence[PagedKV], pairs: Pairs) -> None:
    """(source, destination) each, as if in order: a later pair may read or write what an earlier
    one wrote. One launch unless it does."""
    places, words = _places(layers), _words(layers)
    for together in rounds(pairs):
        _copy(layers[0].keys.device, places, places, together, words, words, words)


def swap_out(layers: Sequence[PagedKV], host: Sequence[torch.Tensor], pairs: Pairs) -> None:
    """(block, host block) each. host: a layer's keys and values, (blocks, 2, ...), pinned where the
    cache is a GPU's; it is written when the stream comes to it."""
    words = _words(layers)
    _copy(layers[0].keys.device, _places(layers), _halves(host), pairs, words, 2 * words, words)


def swap_in(layers: Sequence[PagedKV], host: Sequence[torch.Tensor], pairs: Pairs) -> None:
    """(host block, block) each, of memory that `swap_out` wrote."""
    words = _words(layers)
    _copy(layers[0].keys.device, _halves(host), _places(layers), pairs, 2 * words, words, words)


def rounds(pairs: Pairs) -> list[list[tuple[int, int]]]:
    """The pairs in groups, one after another, in none of which the order matters."""
    groups: list[list[tuple[int, int]]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, destination in pairs:
        if not groups or source in written or destination in read | written:
            groups.append([])
            read, written = set(), set()
        groups[-1].append((source, destination))
        read.add(source)
        written.add(destination)
    return groups


def _places(layers: Sequence[PagedKV]) -> list[int]:
    return [half.data_ptr() for layer in layers for half in (layer.keys, layer.values)]


def _halves(host: Sequence[torch.Tensor]) -> list[int]:
    return [half.data_ptr() for blocks in host for half in (blocks[0, 0], blocks[0, 1])]


def _words(layers: Sequence[PagedKV]) -> int:
    """In one block's keys; allocation sees to it that they are whole."""
    return layers[0].keys[0].nbytes // _WORD_BYTES


def _copy(
    device: torch.device,
    sources: Sequence[int],
    destinations: Sequence[int],
    pairs: Pairs,
    from_stride: int,
    to_stride: int,
    num_words: int,
) -> None:
    if not pairs:
        return
    flat = [number for pair in pairs for number in pair]
    listed = upload(np.array([*sources, *destinations, *flat], dtype=np.int64), device)
    grid = (len(pairs), len(sources), triton.cdiv(num_words, _BLOCK))
    _copy_kernel[grid](
        listed, len(sources), from_stride, to_stride, num_words, BLOCK=_BLOCK, num_warps=4
    )
