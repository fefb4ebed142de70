"""Paged causal attention of slices of several tokens: the prefill chunks of a hybrid batch.

A tile is `TOKENS` consecutive tokens of one slice times all query heads that share a kv head (GQA
packing), so each K/V tile is read once for the whole group. The slice of a tile is found on the
device, so the launch depends on upper bounds alone and can be captured in a CUDA graph and replayed
over other lengths. Shape suffixes as in `kv_tiles`."""

import torch
import triton
import triton.language as tl

from kernels.interface import AttentionShape, Batch
from kernels.triton.cache import PagedKV
from kernels.triton.kv_tiles import (
    LOG2_E,
    MASKED,
    accumulate,
    alibi,
    aligned_rows,
    constants,
    load_tile,
    scores,
)
from kernels.triton.prefill_tiles import PrefillTiles
from kernels.triton.tiles import PrefillTile, prefill_tile, target_arch


@triton.jit
def attend_tile(
    turn: tl.tensor,
    head: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    tile_starts_ptr: tl.tensor,
    slices_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    alibi_ptr: tl.tensor,
    num_slices: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    v_scale: tl.tensor,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    FLOAT8: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Attention of one head's tile, the last one listed at turn 0. Turns past the last tile have
    nothing to do."""
    # Late tiles have the longest context: starting them first, of all heads, balances the tail.
    tile = tl.load(tile_starts_ptr + num_slices) - 1 - turn
    if tile >= 0:
        s = tl.load(slices_ptr + tile)
        query_start = tl.load(query_starts_ptr + s)
        length = tl.load(lengths_ptr + s)
        token_0 = (tile - tl.load(tile_starts_ptr + s)) * TOKENS
        start = tl.load(starts_ptr + s)
        table_ptr = tables_ptr + s.to(tl.int64) * table_stride
        row = tl.arange(0, ROWS)
        d = tl.arange(0, BLOCK_D)
        token_R = token_0 + row // GROUP
        inside_R = (row < TOKENS * GROUP) & (token_R < length)
        q_head_R = head * GROUP + row % GROUP
        q_row_R = ((query_start + token_R).to(tl.int64) * (G * GROUP) + q_head_R) * D
        q_mask = inside_R[:, None] & (d < D)[None, :]
        q_RD = tl.load(q_ptr + q_row_R[:, None] + d[None, :], mask=q_mask, other=0.0)

        position_R = start + token_R
        kv_end = start + tl.minimum(token_0 + TOKENS, length)
        # Up to full_end every row of the tile attends to every position: no mask needed.
        full_end = (start + token_0 + 1) // BLOCK_K * BLOCK_K
        kv_begin = 0
        if WINDOW > 0:
            kv_begin = tl.maximum(start + token_0 - WINDOW + 1, 0) // BLOCK_K * BLOCK_K
            full_end = kv_begin
        if WINDOW < 0:  # chunks
            kv_begin = (start + token_0) // -WINDOW * -WINDOW // BLOCK_K * BLOCK_K
            full_end = kv_begin
        row_max_R = tl.full((ROWS,), MASKED, tl.float32)
        row_sum_R = tl.zeros((ROWS,), tl.float32)
        acc_RD = tl.zeros((ROWS, BLOCK_D), tl.float32)
        column = tl.arange(0, BLOCK_K)
        # Scores of products alone are scaled by the softmax, which needs no instruction more. Not
        # with a window, whose rows may begin with tiles that they do not see at all: a fused
        # multiply-add does not round MASKED * factor as the maximum is rounded, and the
        # difference, to the power of 2, is no number.
        PLAIN: tl.constexpr = SOFTCAP == 0 and ALIBI == 0 and WINDOW == 0
        factor = scale * LOG2_E if PLAIN else 1.0
        for begin in range(kv_begin, full_end, BLOCK_K):
            position_K = begin + column
            inside_K = position_K >= 0
            kv_row_K = aligned_rows(
                table_ptr, begin, column, inside_K, head, PAGE, G, D, BLOCK_K, WHOLE=True
            )
            k_KD = load_tile(k_ptr, kv_row_K, inside_K, q_RD, D, BLOCK_D, FLOAT8, WHOLE=True)
            if PLAIN:
                score_RK = tl.dot(q_RD, tl.trans(k_KD), input_precision=PRECISION)
            else:
                score_RK = scores(q_RD, k_KD, scale, SOFTCAP, PRECISION)
            if ALIBI > 0:
                score_RK += alibi(
                    alibi_ptr, q_head_R, inside_R, position_R, position_K, inside_K, ALIBI
                )
            v_KD = load_tile(v_ptr, kv_row_K, inside_K, q_RD, D, BLOCK_D, FLOAT8, WHOLE=True)
            row_max_R, row_sum_R, acc_RD = accumulate(
                score_RK, v_KD, row_max_R, row_sum_R, acc_RD, PRECISION, factor
            )
        # Without a window at most two tiles are left: nothing to prefetch, registers to save.
        for begin in tl.range(full_end, kv_end, BLOCK_K, num_stages=1 if WINDOW == 0 else None):
            position_K = begin + column
            inside_K = position_K < kv_end
            kv_row_K = aligned_rows(
                table_ptr, begin, column, inside_K, head, PAGE, G, D, BLOCK_K, WHOLE=False
            )
            k_KD = load_tile(k_ptr, kv_row_K, inside_K, q_RD, D, BLOCK_D, FLOAT8)
            if PLAIN:
                score_RK = tl.dot(q_RD, tl.trans(k_KD), input_precision=PRECISION)
            else:
                score_RK = scores(q_RD, k_KD, scale, SOFTCAP, PRECISION)
            if ALIBI > 0:
                score_RK += alibi(
                    alibi_ptr, q_head_R, inside_R, position_R, position_K, inside_K, ALIBI
                )
            sees = position_K[None, :] <= position_R[:, None]
            if WINDOW > 0:
                sees = sees & (position_K[None, :] > position_R[:, None] - WINDOW)
            if WINDOW < 0:
                sees = sees & (position_K[None, :] >= (position_R // -WINDOW * -WINDOW)[:, None])
            score_RK = tl.where(sees, score_RK, MASKED)
            v_KD = load_tile(v_ptr, kv_row_K, inside_K, q_RD, D, BLOCK_D, FLOAT8)
            row_max_R, row_sum_R, acc_RD = accumulate(
                score_RK, v_KD, row_max_R, row_sum_R, acc_RD, PRECISION, factor
            )
        if SINKS:
            sink_R = tl.load(sinks_ptr + q_head_R, mask=inside_R, other=MASKED)
            row_sum_R += tl.exp2(sink_R * LOG2_E - row_max_R)
        acc_RD = acc_RD * (v_scale / row_sum_R)[:, None]
        out = out_ptr + q_row_R[:, None] + d[None, :]
        tl.store(out, acc_RD.to(out_ptr.dtype.element_ty), mask=q_mask)


@triton.jit(do_not_specialize=["num_slices", "table_stride"])
def _prefill_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    tile_starts_ptr: tl.tensor,
    slices_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    alibi_ptr: tl.tensor,
    num_slices: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    v_scale: tl.tensor,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    FLOAT8: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    attend_tile(
        tl.program_id(1), tl.program_id(0), q_ptr, k_ptr, v_ptr, out_ptr, tile_starts_ptr,
        slices_ptr, query_starts_ptr, starts_ptr, lengths_ptr, tables_ptr, sinks_ptr, alibi_ptr,
        num_slices, table_stride, scale, v_scale, G, GROUP, D, BLOCK_D, PAGE, TOKENS, ROWS,
        BLOCK_K, WINDOW, SOFTCAP, SINKS, ALIBI, FLOAT8, PRECISION,
    )  # fmt: skip


def tile_of(shape: AttentionShape, dtype: torch.dtype) -> PrefillTile:
    """The tile that this GPU takes for attention of this shape."""
    group = shape.num_heads // shape.num_kv_heads
    return prefill_tile(shape.head_dim, group, dtype, target_arch())


def prefill_attention(
    q_TND: torch.Tensor,
    out_TND: torch.Tensor,
    batch: Batch,
    layer: PagedKV,
    shape: AttentionShape,
    tiles: PrefillTiles,
) -> None:
    """Attention of the listed tiles, which are of `tile_of` this shape, into `out_TND`."""
    tile = tile_of(shape, q_TND.dtype)
    _prefill_kernel[(shape.num_kv_heads, tiles.most)](
        q_TND,
        layer.keys,
        layer.values,
        out_TND,
        tiles.tile_starts_S1,
        tiles.slices_X,
        batch.query_starts_S1,
        batch.starts_S,
        batch.lengths_S,
        batch.block_tables_SB,
        batch.starts_S if shape.sinks_N is None else shape.sinks_N,
        batch.starts_S if shape.alibi_NP is None else shape.alibi_NP,
        batch.starts_S.shape[0],
        batch.block_tables_SB.stride(0),
        shape.scale * layer.k_scale,
        layer.v_scale,
        **constants(shape, layer, q_TND.dtype),
        TOKENS=tile.tokens,
        ROWS=tile.rows,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
