"""Attention of a hybrid batch in one launch, as POD-attention does: decodes, which wait for memory,
beside prefill tiles, which wait for products.

A program does what a program of the decode kernel does, or what one of the prefill kernel does: the
same tiles and the same order of sums, hence the same bits. Two launches on two streams would not
overlap: the programs of the first fill all multiprocessors, and those of the second begin as they
end. In one launch the order of the programs says which share a multiprocessor."""

import torch
import triton
import triton.language as tl

from kernels.interface import AttentionShape, Batch
from kernels.triton import decode, prefill
from kernels.triton.cache import PagedKV
from kernels.triton.decode import attend_range, empty_parts, merge_parts
from kernels.triton.kv_tiles import constants
from kernels.triton.prefill import attend_tile
from kernels.triton.prefill_tiles import PrefillTiles
from kernels.triton.tiles import stripe
from kernels.triton.work_list import WorkList


@triton.jit
def role_of(
    program: tl.tensor, NUM_RANGES: tl.constexpr, STRIPE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(whether the program takes a range of the work list rather than a tile, and which one).

    As long as there are ranges, one of each two programs takes one. Which of the two alternates by
    stripes of as many programs as there are multiprocessors: whether these are given one program
    each in turn, or two at once, each gets one of both kinds."""
    pair = program // 2
    is_range = (pair < NUM_RANGES) & ((program + program // STRIPE) % 2 == 0)
    return is_range, tl.where(pair < NUM_RANGES, pair, program - NUM_RANGES)


@triton.jit(do_not_specialize=["num_decode_slots", "num_slices", "table_stride"])
def _hybrid_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    part_out_ptr: tl.tensor,
    part_lse_ptr: tl.tensor,
    unit_starts_ptr: tl.tensor,
    first_slice_ptr: tl.tensor,
    tile_starts_ptr: tl.tensor,
    slices_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    alibi_ptr: tl.tensor,
    num_decode_slots: tl.tensor,
    num_slices: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    v_scale: tl.tensor,
    NUM_RANGES: tl.constexpr,
    STRIPE: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DECODE_ROWS: tl.constexpr,
    DECODE_BLOCK_K: tl.constexpr,
    DECODE_STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    FLOAT8: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    is_range, index = role_of(tl.program_id(0), NUM_RANGES, STRIPE)
    if is_range:
        attend_range(
            index, NUM_RANGES, q_ptr, k_ptr, v_ptr, out_ptr, part_out_ptr, part_lse_ptr,
            unit_starts_ptr, first_slice_ptr, query_starts_ptr, starts_ptr, tables_ptr, sinks_ptr,
            alibi_ptr, num_decode_slots, table_stride, scale, v_scale, G, GROUP, D, BLOCK_D, PAGE,
            DECODE_ROWS, DECODE_BLOCK_K, WINDOW, SOFTCAP, SINKS, ALIBI, FLOAT8, PRECISION,
            DECODE_STAGES,
        )  # fmt: skip
    else:
        attend_tile(
            index // G, index % G, q_ptr, k_ptr, v_ptr, out_ptr, tile_starts_ptr, slices_ptr,
            query_starts_ptr, starts_ptr, lengths_ptr, tables_ptr, sinks_ptr, alibi_ptr,
            num_slices, table_stride, scale, v_scale, G, GROUP, D, BLOCK_D, PAGE, TOKENS, ROWS,
            BLOCK_K, WINDOW, SOFTCAP, SINKS, ALIBI, FLOAT8, PRECISION,
        )  # fmt: skip


def fits(shape: AttentionShape, dtype: torch.dtype) -> bool:
    """Whether both kinds of programs have as many warps, which a launch has only one number of."""
    return prefill.tile_of(shape, dtype).num_warps == decode.tile_of(shape, dtype).num_warps


def hybrid_attention(
    q_TND: torch.Tensor,
    out_TND: torch.Tensor,
    batch: Batch,
    layer: PagedKV,
    shape: AttentionShape,
    work: WorkList,
    tiles: PrefillTiles,
) -> None:
    """As `decode_attention` and `prefill_attention`, for a shape that `fits`."""
    tile, decode_tile = prefill.tile_of(shape, q_TND.dtype), decode.tile_of(shape, q_TND.dtype)
    parts = part_out, part_lse = empty_parts(work, shape, q_TND.device)
    num_tiles = max(tiles.most * shape.num_kv_heads, work.num_programs)
    _hybrid_kernel[(work.num_programs + num_tiles,)](
        q_TND,
        layer.keys,
        layer.values,
        out_TND,
        part_out,
        part_lse,
        work.tile_starts_S1,
        work.first_slice_P,
        tiles.tile_starts_S1,
        tiles.slices_X,
        batch.query_starts_S1,
        batch.starts_S,
        batch.lengths_S,
        batch.block_tables_SB,
        part_lse if shape.sinks_N is None else shape.sinks_N,  # then not read
        part_lse if shape.alibi_NP is None else shape.alibi_NP,
        work.num_slices,
        batch.starts_S.shape[0],
        batch.block_tables_SB.stride(0),
        shape.scale * layer.k_scale,
        layer.v_scale,
        **constants(shape, layer, q_TND.dtype),
        NUM_RANGES=work.num_programs,
        STRIPE=stripe(),
        TOKENS=tile.tokens,
        ROWS=tile.rows,
        BLOCK_K=tile.block_k,
        DECODE_ROWS=decode_tile.rows,
        DECODE_BLOCK_K=decode_tile.block_k,
        DECODE_STAGES=decode_tile.num_stages,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    merge_parts(parts, out_TND, batch, shape, work)
