"""Paged attention of one-token slices: split-KV (flash decoding) over a work list, with a merge.

A program takes its share of the list (`work_list`) piece by piece. A piece is one request's kv head
and a run of its context, with all query heads of the group packed into the rows of the matrix
products: K and V are read once per group. A head that lies in one share is written at once; the
others, of which a share holds two at most, its first and its last, are merged afterwards.
"""

import torch
import triton
import triton.language as tl

from kernels.interface import AttentionShape, Batch
from kernels.triton.cache import PagedKV
from kernels.triton.kv_tiles import LOG2_E, MASKED, accumulate, kv_rows, load_tile, scores
from kernels.triton.tiles import decode_tile
from kernels.triton.work_list import WorkList, context

_BLOCK_PARTS = 16


@triton.jit(do_not_specialize=["num_slices", "table_stride"])
def _decode_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    part_out_ptr: tl.tensor,
    part_log_total_ptr: tl.tensor,
    tile_starts_ptr: tl.tensor,
    first_slice_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    num_slices: tl.tensor,
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
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    FLOAT8: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    total = tl.load(tile_starts_ptr + num_slices) * G
    share = tl.cdiv(total, tl.num_programs(0))
    first_unit = program * share
    last_unit = tl.minimum(first_unit + share, total)
    s = tl.load(first_slice_ptr + program)
    unit = first_unit
    row = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    column = tl.arange(0, BLOCK_K)
    mask = (row < GROUP)[:, None] & (d < D)[None, :]
    while unit < last_unit:
        slice_unit = tl.load(tile_starts_ptr + s) * G
        next_slice_unit = tl.load(tile_starts_ptr + s + 1) * G
        num_tiles = (next_slice_unit - slice_unit) // G
        head = (unit - slice_unit) // tl.maximum(num_tiles, 1)
        tile = (unit - slice_unit) - head * num_tiles
        num_here = tl.minimum(num_tiles - tile, last_unit - unit)
        if num_here > 0:
            context_begin, context_end = context(starts_ptr, s, s >= 0, WINDOW)
            part_begin = context_begin + tile * BLOCK_K
            part_end = tl.minimum(part_begin + num_here * BLOCK_K, context_end)
            token = tl.load(query_starts_ptr + s).to(tl.int64)
            table_ptr = tables_ptr + s.to(tl.int64) * table_stride
            q_row_R = (token * (G * GROUP) + head * GROUP + row) * D
            q_RD = tl.load(q_ptr + q_row_R[:, None] + d[None, :], mask=mask, other=0.0)
            highest_R = tl.full((ROWS,), MASKED, tl.float32)
            total_R = tl.zeros((ROWS,), tl.float32)
            out_RD = tl.zeros((ROWS, BLOCK_D), tl.float32)
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
            if SINKS and num_here == num_tiles:
                sink_R = tl.load(sinks_ptr + head * GROUP + row, mask=row < GROUP, other=MASKED)
                total_R += tl.exp2(sink_R * LOG2_E - highest_R)
            out_RD = out_RD * (v_scale / total_R)[:, None]
            if num_here == num_tiles:
                out = out_ptr + q_row_R[:, None] + d[None, :]
                tl.store(out, out_RD.to(out_ptr.dtype.element_ty), mask=mask)
            else:
                place = program * 2 + (unit != first_unit).to(tl.int32)
                part_row_R = place * GROUP + row
                part_out = part_out_ptr + part_row_R[:, None] * D + d[None, :]
                tl.store(part_out, out_RD, mask=mask)
                log_total_R = highest_R + tl.log2(total_R)
                tl.store(part_log_total_ptr + part_row_R, log_total_R, mask=row < GROUP)
        unit += num_here
        s = tl.where(unit >= next_slice_unit, s + 1, s)


@triton.jit(do_not_specialize=["num_slices"])
def _merge_kernel(
    part_out_ptr: tl.tensor,
    part_log_total_ptr: tl.tensor,
    out_ptr: tl.tensor,
    tile_starts_ptr: tl.tensor,
    first_slice_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    num_slices: tl.tensor,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
) -> None:
    # A head is in parts where a share begins inside it; the first such share's program merges it.
    program = tl.program_id(0)
    row = tl.program_id(1)
    total = tl.load(tile_starts_ptr + num_slices) * G
    share = tl.maximum(tl.cdiv(total, tl.num_programs(0)), 1)
    unit = program * share
    if (program > 0) & (unit < total):
        s = tl.load(first_slice_ptr + program)
        slice_unit = tl.load(tile_starts_ptr + s) * G
        num_tiles = tl.load(tile_starts_ptr + s + 1) - slice_unit // G
        head = (unit - slice_unit) // num_tiles
        head_unit = slice_unit + head * num_tiles
        share_before = unit - share
        if (head_unit < unit) & (head_unit >= share_before):
            # It is the last piece of the share before, unless it is all of that one.
            first_place = (program - 1) * 2 + (head_unit > share_before).to(tl.int32)
            num_parts = (head_unit + num_tiles - 1) // share - program + 2
            token = tl.load(query_starts_ptr + s).to(tl.int64)
            d = tl.arange(0, BLOCK_D)
            highest = tl.full((), MASKED, tl.float32)
            total_weight = tl.zeros((), tl.float32)
            if SINKS:
                highest = tl.load(sinks_ptr + head * GROUP + row) * LOG2_E
                total_weight += 1.0
            out_D = tl.zeros((BLOCK_D,), tl.float32)
            for base in range(0, num_parts, BLOCK_PARTS):
                part = base + tl.arange(0, BLOCK_PARTS)
                place = tl.where(part == 0, first_place, (program - 1 + part) * 2)
                part_row = place * GROUP + row
                inside = part < num_parts
                log_total = tl.load(part_log_total_ptr + part_row, mask=inside, other=MASKED)
                new_highest = tl.maximum(highest, tl.max(log_total, 0))
                weight = tl.exp2(log_total - new_highest)
                shrink = tl.exp2(highest - new_highest)
                part_out = part_out_ptr + part_row[:, None] * D + d[None, :]
                mask = inside[:, None] & (d < D)[None, :]
                out_PD = tl.load(part_out, mask=mask, other=0.0)
                out_D = out_D * shrink + tl.sum(out_PD * weight[:, None], 0)
                total_weight = total_weight * shrink + tl.sum(weight, 0)
                highest = new_highest
            out_row = out_ptr + (token * (G * GROUP) + head * GROUP + row) * D + d
            tl.store(out_row, (out_D / total_weight).to(out_ptr.dtype.element_ty), mask=d < D)


def decode_attention(
    q_TND: torch.Tensor,
    out_TND: torch.Tensor,
    batch: Batch,
    layer: PagedKV,
    shape: AttentionShape,
    work: WorkList,
) -> None:
    """Attention of the slices on the work list, into `out_TND`."""
    N, G, D = shape.num_heads, shape.num_kv_heads, shape.head_dim
    group = N // G
    tile = decode_tile(D, group, q_TND.dtype)
    places = (work.num_programs * 2, group)
    part_out = torch.empty((*places, D), dtype=torch.float32, device=q_TND.device)
    part_log_total = torch.empty(places, dtype=torch.float32, device=q_TND.device)
    block_d = triton.next_power_of_2(D)
    has_sinks = shape.sinks_N is not None
    sinks = shape.sinks_N if has_sinks else part_log_total  # then not read
    _decode_kernel[(work.num_programs,)](
        q_TND,
        layer.keys,
        layer.values,
        out_TND,
        part_out,
        part_log_total,
        work.tile_starts_S1,
        work.first_slice_P,
        batch.query_starts_S1,
        batch.starts_S,
        batch.block_tables_SB,
        sinks,
        work.num_slices,
        batch.block_tables_SB.stride(0),
        shape.scale * layer.k_scale,
        layer.v_scale,
        G=G,
        GROUP=group,
        D=D,
        BLOCK_D=block_d,
        PAGE=layer.block_size,
        ROWS=tile.rows,
        BLOCK_K=tile.block_k,
        WINDOW=shape.sliding_window or 0,
        SOFTCAP=shape.softcap or 0.0,
        SINKS=has_sinks,
        FLOAT8=layer.is_float8,
        PRECISION="ieee" if q_TND.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    _merge_kernel[(work.num_programs, group)](
        part_out,
        part_log_total,
        out_TND,
        work.tile_starts_S1,
        work.first_slice_P,
        batch.query_starts_S1,
        sinks,
        work.num_slices,
        G=G,
        GROUP=group,
        D=D,
        BLOCK_D=block_d,
        SINKS=has_sinks,
        BLOCK_PARTS=_BLOCK_PARTS,
        num_warps=2,
    )
