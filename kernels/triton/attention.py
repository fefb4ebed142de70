"""Causal paged attention of a hybrid batch: decodes and prefill chunks in a launch each, or in one.

Both ways give the same bits. Which is faster depends on the GPU and the shape, and is measured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch.nn import functional

from kernels.interface import AttentionShape, Batch
from kernels.triton.cache import FLOAT8, PagedKV, allocate, block_bytes
from kernels.triton.decode import decode_attention
from kernels.triton.hybrid import fits, hybrid_attention
from kernels.triton.kv_tiles import constants
from kernels.triton.prefill import prefill_attention, tile_of
from kernels.triton.prefill_tiles import PrefillTiles
from kernels.triton.work_list import WorkList, WorkLists
from kernels.typical_batch import decodes_within, layers_within, typical_batch

_log = logging.getLogger(__name__)

# The measured batch, about a step of 50 ms of an 8B model on an H100; fewer decodes where their
# contexts would take more memory.
_CHUNK = 1984
_DECODES = 64
_CONTEXT = 1023
_MOST_LAYERS = 8


class Attention:
    """Attention of all layers, with what is derived once from a batch."""

    def __init__(self) -> None:
        self._lists = WorkLists()
        self._compiled = set[tuple[object, ...]]()

    def __call__(
        self,
        q_TND: torch.Tensor,
        batch: Batch,
        layer: PagedKV,
        shape: AttentionShape,
        one_launch: bool,
    ) -> torch.Tensor:
        """(T, N * D). Rows of padding tokens (captured batches) are undefined.

        one_launch: for decodes and chunks, where the shape allows it.
        """
        T, N, D = q_TND.shape
        out_TND = torch.empty_like(q_TND)
        if not T:
            return out_TND.view(T, N * D)
        work, tiles = self._listed(q_TND, batch, shape)
        if one_launch and work and tiles and fits(shape, q_TND.dtype):
            hybrid_attention(q_TND, out_TND, batch, layer, shape, work, tiles)
            if not self._is_new(shape, layer, q_TND.dtype):
                return out_TND.view(T, N * D)
            # Batches of one kind take the kernels below. They are compiled now, not by the first
            # such batch while serving.
            place_TND = torch.empty_like(out_TND)
        else:
            place_TND = out_TND
        if work:
            decode_attention(q_TND, place_TND, batch, layer, shape, work)
        if tiles:
            prefill_attention(q_TND, place_TND, batch, layer, shape, tiles)
        return out_TND.view(T, N * D)

    def _listed(
        self, q_TND: torch.Tensor, batch: Batch, shape: AttentionShape
    ) -> tuple[WorkList | None, PrefillTiles | None]:
        """The work of each kind, where the batch may hold some."""
        work, tiles = None, None
        if batch.captured:
            # Lengths change between replays of a captured launch: any slice may become a decode.
            decode_slots, first_chunk = batch.num_decodes, 0
            has_chunks = batch.max_length > 1
        else:
            decode_slots = first_chunk = batch.num_decodes
            has_chunks = batch.num_decodes < batch.starts_S.shape[0]
        if decode_slots:
            work = self._lists.of(batch, decode_slots, shape, q_TND.dtype)
        if has_chunks:
            tokens = tile_of(shape, q_TND.dtype).tokens
            geometry = (q_TND.shape[0], first_chunk, decode_slots, tokens)
            tiles = self._lists.tiles_of(batch, *geometry)
        return work, tiles

    def _is_new(self, shape: AttentionShape, layer: PagedKV, dtype: torch.dtype) -> bool:
        """Whether kernels of these constants have not been asked for before."""
        variant = (tuple(constants(shape, layer, dtype).values()), dtype)
        is_new = variant not in self._compiled
        self._compiled.add(variant)
        return is_new


Variant = tuple[AttentionShape, bool, bool]


def variant_of(shape: AttentionShape) -> Variant:
    """Layers of one variant have the same kernels: the dimensions, whether there are sinks, and
    ALiBi."""
    return shape, shape.sinks_N is None, shape.alibi_NP is None


def one_launch_is_faster(
    shape: AttentionShape,
    kv_dtype: torch.dtype,
    block_size: int,
    device: torch.device,
    time_s: Callable[[Sequence[Callable[[], object]]], float],
) -> bool:
    """Whether a typical hybrid batch takes less time in one launch than in two, and gives the same
    bits on this GPU, in layers of this shape.

    time_s: device seconds per call, given the same call over several layers. Raises what a kernel
    raised after which the GPU computes nothing more.
    """
    dtype = torch.bfloat16 if kv_dtype == FLOAT8 else kv_dtype
    if not fits(shape, dtype):
        return False
    num_decodes = decodes_within(
        _DECODES, _CONTEXT, block_size, block_bytes(block_size, shape, kv_dtype)
    )
    if shape.alibi_NP is not None:  # the model may have fewer positions
        missing = max(0, max(_CHUNK, _CONTEXT + 1) - shape.alibi_NP.shape[1])
        shape = replace(shape, alibi_NP=functional.pad(shape.alibi_NP, (0, missing)))
    try:
        two, one = _in_two_and_one(num_decodes, shape, kv_dtype, dtype, block_size, device)
        if not torch.equal(one[0](), two[0]()):
            _log.error("attention in one launch differs from that in two, and is not used")
            return False
        two_s, one_s = time_s(two), time_s(one)
    except Exception as error:  # of any kind, e.g. no memory: it can be done without
        if not _computes(device):
            raise
        _log.error("attention in one launch fails, and is not used: %s", error)
        return False
    _log.info(
        "attention of %d tokens beside %d decodes (window %s, sinks %s, ALiBi %s, softcap %s): "
        "%.0f us a layer in one launch, %.0f in two",
        _CHUNK, num_decodes, shape.sliding_window, shape.sinks_N is not None,
        shape.alibi_NP is not None, shape.softcap, 1e6 * one_s, 1e6 * two_s,
    )  # fmt: skip
    return one_s < two_s


def _in_two_and_one(
    num_decodes: int, shape: AttentionShape, kv_dtype: torch.dtype, dtype: torch.dtype,
    block_size: int, device: torch.device,
) -> tuple[Sequence[Callable[[], torch.Tensor]], ...]:  # fmt: skip
    """A typical hybrid batch over several layers, in two launches and in one."""
    batch, num_blocks = typical_batch(num_decodes, _CONTEXT, _CHUNK, block_size, device)
    one_block = block_bytes(block_size, shape, kv_dtype)
    num_layers = layers_within(_MOST_LAYERS, num_blocks, one_block)
    layers = allocate(num_layers, num_blocks, block_size, shape, kv_dtype, device)
    for layer in layers:  # products of zeros run faster than others
        for stored in (layer.keys, layer.values):
            _ = stored.random_(0, 0x7F) if layer.is_float8 else stored.normal_()
    size = (num_decodes + _CHUNK, shape.num_heads, shape.head_dim)
    q_TND = torch.randn(size, device=device).to(dtype)
    attention = Attention()
    two, one = (
        [partial(attention, q_TND, batch, x, shape, one_launch) for x in layers]
        for one_launch in (False, True)
    )
    return two, one


def _computes(device: torch.device) -> bool:
    """Whether the device still works; after an illegal access every call fails."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return bool(torch.ones(1, device=device).item() == 1)
    except Exception:  # of any kind: the error that came first says more
        return False
