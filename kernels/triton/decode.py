"""Paged attention of one-token slices: split-KV (flash decoding) over a work list, with a merge.

A program processes its part of the list (`work_list`) split by split. A split is a range of KV
tiles of one kv head of one request, with all query heads of the group packed into the rows of the
matrix products (GQA packing): K and V are read once per group. A head within one program is written
directly; the others, at most two per program, its first and its last, are combined by their
log-sum-exp. Shape suffixes as in `kv_tiles`."""

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
    constants,
    kv_rows,
    load_tile,
    scores,
)
from kernels.triton.tiles import DecodeTile, decode_tile, target_arch
from kernels.triton.work_list import WorkList, context

_BLOCK_PARTS = 16


@triton.jit
def attend_range(
    program: tl.tensor,
    num_programs: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    part_out_ptr: tl.tensor,
    part_lse_ptr: tl.tensor,
    tile_starts_ptr: tl.tensor,
    first_slice_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    starts_ptr: tl.tensor,
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
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    FLOAT8: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One program's range of the work list, loads of whose tiles run ahead by STAGES."""
    total = tl.load(tile_starts_ptr + num_slices) * G
    units_per_program = tl.cdiv(total, num_programs)
    first_unit = program * units_per_program
    last_unit = tl.minimum(first_unit + units_per_program, total)
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
            row_max_R = tl.full((ROWS,), MASKED, tl.float32)
            row_sum_R = tl.zeros((ROWS,), tl.float32)
            acc_RD = tl.zeros((ROWS, BLOCK_D), tl.float32)
            for begin in tl.range(part_begin, part_end, BLOCK_K, num_stages=STAGES):
                position_K = begin + column
                inside_K = position_K < part_end
                kv_row_K = kv_rows(table_ptr, position_K, inside_K, head, PAGE, G, D)
                k_KD = load_tile(k_ptr, kv_row_K, inside_K, q_RD, D, BLOCK_D, FLOAT8)
                v_KD = load_tile(v_ptr, kv_row_K, inside_K, q_RD, D, BLOCK_D, FLOAT8)
                score_RK = scores(q_RD, k_KD, scale, SOFTCAP, PRECISION)
                if ALIBI > 0:
                    own = context_end - 1
                    score_RK += alibi(
                        alibi_ptr, head * GROUP + row, row < GROUP, own, position_K, inside_K, ALIBI
                    )
                score_RK = tl.where(inside_K[None, :], score_RK, MASKED)
                row_max_R, row_sum_R, acc_RD = accumulate(
                    score_RK, v_KD, row_max_R, row_sum_R, acc_RD, PRECISION
                )
            if SINKS and num_here == num_tiles:
                sink_R = tl.load(sinks_ptr + head * GROUP + row, mask=row < GROUP, other=MASKED)
                row_sum_R += tl.exp2(sink_R * LOG2_E - row_max_R)
            acc_RD = acc_RD * (v_scale / row_sum_R)[:, None]
            if num_here == num_tiles:
                out = out_ptr + q_row_R[:, None] + d[None, :]
                tl.store(out, acc_RD.to(out_ptr.dtype.element_ty), mask=mask)
            else:
                slot = program * 2 + (unit != first_unit).to(tl.int32)
                part_row_R = slot * GROUP + row
                part_out = part_out_ptr + part_row_R[:, None] * D + d[None, :]
                tl.store(part_out, acc_RD, mask=mask)
                lse_R = row_max_R + tl.log2(row_sum_R)
                tl.store(part_lse_ptr + part_row_R, lse_R, mask=row < GROUP)
        unit += num_here
        s = tl.where(unit >= next_slice_unit, s + 1, s)


@triton.jit(do_not_specialize=["num_slices", "table_stride"])
def _decode_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    part_out_ptr: tl.tensor,
    part_lse_ptr: tl.tensor,
    tile_starts_ptr: tl.tensor,
    first_slice_ptr: tl.tensor,
    query_starts_ptr: tl.tensor,
    starts_ptr: tl.tensor,
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
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    FLOAT8: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    attend_range(
        tl.program_id(0), tl.num_programs(0), q_ptr, k_ptr, v_ptr, out_ptr, part_out_ptr,
        part_lse_ptr, tile_starts_ptr, first_slice_ptr, query_starts_ptr, starts_ptr,
        tables_ptr, sinks_ptr, alibi_ptr, num_slices, table_stride, scale, v_scale, G, GROUP, D,
        BLOCK_D, PAGE, ROWS, BLOCK_K, WINDOW, SOFTCAP, SINKS, ALIBI, FLOAT8, PRECISION, STAGES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_slices"])
def _merge_kernel(
    part_out_ptr: tl.tensor,
    part_lse_ptr: tl.tensor,
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
    # A head is split where a program's units begin inside it; the first such program combines it.
    program = tl.program_id(0)
    row = tl.program_id(1)
    total = tl.load(tile_starts_ptr + num_slices) * G
    units_per_program = tl.maximum(tl.cdiv(total, tl.num_programs(0)), 1)
    unit = program * units_per_program
    if (program > 0) & (unit < total):
        s = tl.load(first_slice_ptr + program)
        slice_unit = tl.load(tile_starts_ptr + s) * G
        num_tiles = tl.load(tile_starts_ptr + s + 1) - slice_unit // G
        head = (unit - slice_unit) // num_tiles
        head_unit = slice_unit + head * num_tiles
        previous_unit = unit - units_per_program
        if (head_unit < unit) & (head_unit >= previous_unit):
            # Its first split is the last one of the program before, or that program's only one.
            first_slot = (program - 1) * 2 + (head_unit > previous_unit).to(tl.int32)
            num_parts = (head_unit + num_tiles - 1) // units_per_program - program + 2
            token = tl.load(query_starts_ptr + s).to(tl.int64)
            d = tl.arange(0, BLOCK_D)
            max_lse = tl.full((), MASKED, tl.float32)
            sum_weights = tl.zeros((), tl.float32)
            if SINKS:
                max_lse = tl.load(sinks_ptr + head * GROUP + row) * LOG2_E
                sum_weights += 1.0
            out_D = tl.zeros((BLOCK_D,), tl.float32)
            for base in range(0, num_parts, BLOCK_PARTS):
                part = base + tl.arange(0, BLOCK_PARTS)
                slot = tl.where(part == 0, first_slot, (program - 1 + part) * 2)
                part_row = slot * GROUP + row
                inside = part < num_parts
                lse = tl.load(part_lse_ptr + part_row, mask=inside, other=MASKED)
                new_max = tl.maximum(max_lse, tl.max(lse, 0))
                weight = tl.exp2(lse - new_max)
                rescale = tl.exp2(max_lse - new_max)
                part_out = part_out_ptr + part_row[:, None] * D + d[None, :]
                mask = inside[:, None] & (d < D)[None, :]
                out_PD = tl.load(part_out, mask=mask, other=0.0)
                out_D = out_D * rescale + tl.sum(out_PD * weight[:, None], 0)
                sum_weights = sum_weights * rescale + tl.sum(weight, 0)
                max_lse = new_max
            out_row = out_ptr + (token * (G * GROUP) + head * GROUP + row) * D + d
            tl.store(out_row, (out_D / sum_weights).to(out_ptr.dtype.element_ty), mask=d < D)


def empty_parts(
    work: WorkList, shape: AttentionShape, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 places for heads that are split, two per program: results, (2 P, group, D), and their
    base-2 log-sum-exp, (2 P, group)."""
    size = (work.num_programs * 2, shape.num_heads // shape.num_kv_heads)
    out = torch.empty((*size, shape.head_dim), dtype=torch.float32, device=device)
    return out, torch.empty(size, dtype=torch.float32, device=device)


def tile_of(shape: AttentionShape, dtype: torch.dtype) -> DecodeTile:
    """The tile that attention of this shape takes."""
    group = shape.num_heads // shape.num_kv_heads
    return decode_tile(shape.head_dim, group, dtype, target_arch())


def decode_attention(
    q_TND: torch.Tensor,
    out_TND: torch.Tensor,
    batch: Batch,
    layer: PagedKV,
    shape: AttentionShape,
    work: WorkList,
) -> None:
    """Attention of the slices on the work list, written to `out_TND`."""
    tile = tile_of(shape, q_TND.dtype)
    parts = part_out, part_lse = empty_parts(work, shape, q_TND.device)
    _decode_kernel[(work.num_programs,)](
        q_TND,
        layer.keys,
        layer.values,
        out_TND,
        part_out,
        part_lse,
        work.tile_starts_S1,
        work.first_slice_P,
        batch.query_starts_S1,
        batch.starts_S,
        batch.block_tables_SB,
        part_lse if shape.sinks_N is None else shape.sinks_N,  # then not read
        part_lse if shape.alibi_NP is None else shape.alibi_NP,
        work.num_slices,
        batch.block_tables_SB.stride(0),
        shape.scale * layer.k_scale,
        layer.v_scale,
        **constants(shape, layer, q_TND.dtype),
        ROWS=tile.rows,
        BLOCK_K=tile.block_k,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )
    merge_parts(parts, out_TND, batch, shape, work)


def merge_parts(
    parts: tuple[torch.Tensor, torch.Tensor],
    out_TND: torch.Tensor,
    batch: Batch,
    shape: AttentionShape,
    work: WorkList,
) -> None:
    """Combine the parts of split heads into `out_TND`."""
    N, G, D = shape.num_heads, shape.num_kv_heads, shape.head_dim
    _merge_kernel[(work.num_programs, N // G)](
        *parts,
        out_TND,
        work.tile_starts_S1,
        work.first_slice_P,
        batch.query_starts_S1,
        parts[1] if shape.sinks_N is None else shape.sinks_N,
        work.num_slices,
        G=G,
        GROUP=N // G,
        D=D,
        BLOCK_D=triton.next_power_of_2(D),
        SINKS=shape.sinks_N is not None,
        BLOCK_PARTS=_BLOCK_PARTS,
        num_warps=2,
    )
