"""Paged attention of one-token slices: split-KV (flash decoding) with a merge.

One program takes one request's kv head and one part of its context, with all query heads of the
group packed into the rows of its matrix products: K and V are read once per group. Parts are cut
per request, so short and long contexts share one launch.
"""

import torch
import triton
import triton.language as tl

from kernels.interface import AttentionShape, Batch
from kernels.triton.cache import PagedKV
from kernels.triton.kv_tiles import MASKED, accumulate, kv_rows, load_tile, scores
from kernels.triton.tiles import KVSplits, decode_tile, kv_splits


@triton.jit
def _context(
    starts_ptr: tl.tensor, s: tl.tensor, WINDOW: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """[begin, end) of the kv positions that the one token of slice s sees."""
    end = tl.load(starts_ptr + s) + 1
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(end - WINDOW, 0)
    return begin, end


@triton.jit
def _part_length(
    num_positions: tl.tensor, SPLITS: tl.constexpr, GRANULE: tl.constexpr
) -> tl.tensor:
    return tl.cdiv(tl.cdiv(num_positions, SPLITS), GRANULE) * GRANULE


@triton.jit
def _decode_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    part_out_ptr: tl.tensor,
    part_log_total_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    v_scale: tl.tensor,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    GRANULE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FLOAT8: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    s = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    context_begin, context_end = _context(starts_ptr, s, WINDOW)
    part_length = _part_length(context_end - context_begin, SPLITS, GRANULE)
    part_begin = context_begin + part * part_length
    # Padding slices have no token, chunks several: neither is this kernel's.
    if (tl.load(lengths_ptr + s) == 1) & (part_begin < context_end):
        part_end = tl.minimum(part_begin + part_length, context_end)
        token = tl.load(query_starts_ptr + s).to(tl.int64)
        table_ptr = tables_ptr + s.to(tl.int64) * table_stride
        row = tl.arange(0, ROWS)
        d = tl.arange(0, BLOCK_D)
        q_head_R = head * GROUP + row
        mask = (row < GROUP)[:, None] & (d < D)[None, :]
        q_row_R = (token * (G * GROUP) + q_head_R) * D
        q_RD = tl.load(q_ptr + q_row_R[:, None] + d[None, :], mask=mask, other=0.0)
        highest_R = tl.full((ROWS,), MASKED, tl.float32)
        total_R = tl.zeros((ROWS,), tl.float32)
        out_RD = tl.zeros((ROWS, BLOCK_D), tl.float32)
        column = tl.arange(0, BLOCK_K)
        for begin in range(part_begin, part_end, BLOCK_K):
            position_K = begin + column
            inside_K = position_K < part_end
            kv_row_K = kv_rows(table_ptr, position_K, inside_K, head, PAGE, G, D)
            k_KD = load_tile(k_ptr, kv_row_K, inside_K, q_RD, D, BLOCK_D, FLOAT8)
            v_KD = load_tile(v_ptr, kv_row_K, inside_K, q_RD, D, BLOCK_D, FLOAT8)
            score_RK = scores(q_RD, k_KD, scale, SOFTCAP, PRECISION)
            score_RK = tl.where(inside_K[None, :], score_RK, MASKED)
            highest_R, total_R, out_RD = accumulate(
                score_RK, v_KD, highest_R, total_R, out_RD, PRECISION
            )
        out_RD = out_RD * (v_scale / total_R)[:, None]
        if SPLITS == 1:
            out = out_ptr + q_row_R[:, None] + d[None, :]
            tl.store(out, out_RD.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            part_row_R = (s.to(tl.int64) * (G * GROUP) + q_head_R) * SPLITS + part
            part_out = part_out_ptr + part_row_R[:, None] * D + d[None, :]
            tl.store(part_out, out_RD, mask=mask)
            log_total_R = highest_R + tl.log2(total_R)
            tl.store(part_log_total_ptr + part_row_R, log_total_R, mask=row < GROUP)


@triton.jit
def _merge_kernel(
    part_out_ptr: tl.tensor,
    part_log_total_ptr: tl.tensor,
    out_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    GRANULE: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    s = tl.program_id(0)
    q_head = tl.program_id(1)
    if tl.load(lengths_ptr + s) == 1:
        context_begin, context_end = _context(starts_ptr, s, WINDOW)
        num_positions = context_end - context_begin
        num_parts = tl.cdiv(num_positions, _part_length(num_positions, SPLITS, GRANULE))
        token = tl.load(query_starts_ptr + s).to(tl.int64)
        part = tl.arange(0, BLOCK_SPLITS)
        d = tl.arange(0, BLOCK_D)
        row = (s.to(tl.int64) * N + q_head) * SPLITS
        log_total = tl.load(part_log_total_ptr + row + part, mask=part < num_parts, other=MASKED)
        weight = tl.exp2(log_total - tl.max(log_total, 0))
        mask = (part < num_parts)[:, None] & (d < D)[None, :]
        part_out = part_out_ptr + (row + part)[:, None] * D + d[None, :]
        out_PD = tl.load(part_out, mask=mask, other=0.0)
        out = tl.sum(out_PD * weight[:, None], 0) / tl.sum(weight, 0)
        out_row = out_ptr + (token * N + q_head) * D + d
        tl.store(out_row, out.to(out_ptr.dtype.element_ty), mask=d < D)


def decode_attention(
    q_TND: torch.Tensor,
    out_TND: torch.Tensor,
    batch: Batch,
    layer: PagedKV,
    shape: AttentionShape,
    num_slots: int,
    splits: KVSplits | None = None,
) -> None:
    """Attention of the one-token slices among the first `num_slots`, into `out_TND`.

    splits: how contexts are cut; None chooses by how many programs fill the GPU.
    """
    N, G, D = shape.num_heads, shape.num_kv_heads, shape.head_dim
    tile = decode_tile(D, N // G, q_TND.dtype)
    longest = min(batch.max_kv_length, shape.sliding_window or batch.max_kv_length)
    splits = splits or kv_splits(num_slots * G, longest, tile.block_k)
    if splits.count > 1:
        part_out = torch.empty(
            (num_slots, N, splits.count, D), dtype=torch.float32, device=q_TND.device
        )
        part_log_total = torch.empty(
            (num_slots, N, splits.count), dtype=torch.float32, device=q_TND.device
        )
    else:
        part_out = part_log_total = out_TND  # unused, but the launch takes a pointer
    geometry = (batch.query_starts_S1, batch.starts_S, batch.lengths_S)
    window = shape.sliding_window or 0
    block_d = triton.next_power_of_2(D)
    _decode_kernel[(num_slots, G, splits.count)](
        q_TND,
        layer.keys,
        layer.values,
        out_TND,
        part_out,
        part_log_total,
        *geometry,
        batch.block_tables_SB,
        batch.block_tables_SB.stride(0),
        shape.scale * layer.k_scale,
        layer.v_scale,
        G=G,
        GROUP=N // G,
        D=D,
        BLOCK_D=block_d,
        PAGE=layer.block_size,
        ROWS=tile.rows,
        BLOCK_K=tile.block_k,
        SPLITS=splits.count,
        GRANULE=splits.granule,
        WINDOW=window,
        SOFTCAP=shape.softcap or 0.0,
        FLOAT8=layer.is_float8,
        PRECISION="ieee" if q_TND.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if splits.count > 1:
        _merge_kernel[(num_slots, N)](
            part_out,
            part_log_total,
            out_TND,
            *geometry,
            N=N,
            D=D,
            BLOCK_D=block_d,
            SPLITS=splits.count,
            GRANULE=splits.granule,
            BLOCK_SPLITS=triton.next_power_of_2(splits.count),
            WINDOW=window,
            num_warps=2,
        )
