"""LoRA adapters in two launches, whatever the routing: shrink A x, expand by B and add to y.

As Punica's SGMV (arXiv 2310.18547), by tiles of rows that use one slot; S-LoRA (arXiv 2311.03285)
has many slots as well. Both kernels find the slot of a tile in a map that the host makes once per
batch from starts and slots, which it has: nothing waits for the device. Programs read a slot's rank
on the device, so those of a captured launch, which has as many as any batch needs, end at once
where there is nothing to do. Sums over input features and over the rank have an order that depends
on the layer alone, so a row has the same result alone and in any batch.

Suffixes as in `kernels.adapters`, besides B tiles, P pieces of the input features.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.adapters import AdapterModule, AdapterRuns, tiles_of
from kernels.triton.tiles import adapter_tile
from kernels.upload import upload

_RANKS = 16  # rows of A in one product: the narrowest tl.dot
_MAX_PARTS = 3  # q, k and v


@triton.jit(do_not_specialize=["num_rows", "rank"])
def _shrink_kernel(
    x_ptr: tl.tensor,
    a_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    shrunk_ptr: tl.tensor,
    num_rows: tl.tensor,
    rank: tl.tensor,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    PIECE_K: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One tile of rows by RANKS rows of one part's A, over one piece of the input features.
    rank: a multiple of RANKS, that of the scratch (P, N, M, rank)."""
    tile_ptr = tiles_ptr + tl.program_id(0) * 3
    slot = tl.load(tile_ptr).to(tl.int64)
    begin = tl.load(tile_ptr + 1)
    end = tl.load(tile_ptr + 2)
    blocks = rank // RANKS
    part = tl.program_id(1) // blocks
    first_r = tl.program_id(1) % blocks * RANKS
    if (begin >= end) | (first_r >= tl.load(ranks_ptr + slot * PARTS + part)):
        return
    n = begin + tl.arange(0, ROWS)
    is_row_N = n < end
    row_N = tl.load(rows_ptr + n, mask=is_row_N, other=0)
    r = first_r + tl.arange(0, RANKS)
    piece = tl.program_id(2)
    x_row_N1 = x_ptr + row_N[:, None].to(tl.int64) * K
    a_row_R1 = a_ptr + ((slot * PARTS + part) * MAX_RANK + r[:, None]) * K
    column = tl.arange(0, BLOCK_K)
    acc_NR = tl.zeros((ROWS, RANKS), tl.float32)
    for base in range(0, PIECE_K, BLOCK_K):
        k = piece * PIECE_K + base + column
        inside_K = k < K
        x_NK = tl.load(x_row_N1 + k[None, :], mask=is_row_N[:, None] & inside_K[None, :], other=0.0)
        mask_RK = (r < MAX_RANK)[:, None] & inside_K[None, :]
        a_RK = tl.load(a_row_R1 + k[None, :], mask=mask_RK, other=0.0)
        acc_NR = tl.dot(x_NK, tl.trans(a_RK), acc_NR, input_precision=PRECISION)
    row_N1 = (piece.to(tl.int64) * num_rows + n[:, None]) * PARTS + part
    tl.store(shrunk_ptr + row_N1 * rank + r[None, :], acc_NR, mask=is_row_N[:, None])


@triton.jit(do_not_specialize=["num_rows", "rank"])
def _expand_kernel(
    shrunk_ptr: tl.tensor,
    b_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    y_ptr: tl.tensor,
    num_rows: tl.tensor,
    rank: tl.tensor,
    OUT: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One tile of rows by BLOCK_O output features of one part. SECOND, THIRD: where the parts
    after the first begin."""
    part = tl.program_id(1)
    begin = tl.where(part == 0, 0, tl.where(part == 1, SECOND, THIRD))
    end = tl.where(part == 0, SECOND, tl.where(part == 1, THIRD, OUT))
    first = begin + tl.program_id(2) * BLOCK_O
    if first >= end:  # as many programs are launched as the widest part needs
        return
    tile_ptr = tiles_ptr + tl.program_id(0) * 3
    slot = tl.load(tile_ptr).to(tl.int64)
    first_n = tl.load(tile_ptr + 1)
    end_n = tl.load(tile_ptr + 2)
    own_rank = tl.load(ranks_ptr + slot * PARTS + part)
    if (first_n >= end_n) | (own_rank == 0):
        return
    n = first_n + tl.arange(0, ROWS)
    is_row_N = n < end_n
    row_N = tl.load(rows_ptr + n, mask=is_row_N, other=0)
    o = first + tl.arange(0, BLOCK_O)
    inside_O = o < end
    shrunk_N1 = shrunk_ptr + (n[:, None].to(tl.int64) * PARTS + part) * rank
    piece_stride = num_rows.to(tl.int64) * PARTS * rank
    acc_NO = tl.zeros((ROWS, BLOCK_O), tl.float32)
    for base in range(0, own_rank, RANKS):
        r = base + tl.arange(0, RANKS)
        shrunk_NR = tl.zeros((ROWS, RANKS), tl.float32)
        for piece in range(PIECES):
            at_NR = shrunk_N1 + piece * piece_stride + r[None, :]
            shrunk_NR += tl.load(at_NR, mask=is_row_N[:, None], other=0.0)
        mask_RO = (r < MAX_RANK)[:, None] & inside_O[None, :]
        b_row_R1 = b_ptr + (slot * MAX_RANK + r[:, None]) * OUT
        b_RO = tl.load(b_row_R1 + o[None, :], mask=mask_RO, other=0.0).to(tl.float32)
        acc_NO = tl.dot(shrunk_NR, b_RO, acc_NO, input_precision=PRECISION)
    y_NO = y_ptr + row_N[:, None].to(tl.int64) * OUT + o[None, :]
    mask_NO = is_row_N[:, None] & inside_O[None, :]
    sum_NO = tl.load(y_NO, mask=mask_NO, other=0.0).to(tl.float32) + acc_NO
    tl.store(y_NO, sum_NO.to(y_ptr.dtype.element_ty), mask=mask_NO)


def add_adapters(
    module: AdapterModule, x_TK: torch.Tensor, y_TO: torch.Tensor, runs: AdapterRuns
) -> None:
    """`Backend.add_adapters`. Raises ValueError for shapes, dtypes or slots that do not match."""
    _check(module, x_TK, y_TO)
    num_slots, _, max_rank, _ = module.a_CMRK.shape
    if runs.captured:
        _launch(module, x_TK.contiguous(), y_TO, runs, max_rank)
        return
    if not len(runs.slots):
        return
    if int(runs.slots.max()) >= num_slots:
        raise ValueError(f"adapter slots {runs.slots.tolist()} of {num_slots}")
    # The scratch holds no rank past those of the batch. ranks_CM is on the host.
    rank = int(module.ranks_CM.numpy()[runs.slots].max())
    if rank:
        _launch(module, x_TK.contiguous(), y_TO, runs, rank)


def warm(module: AdapterModule) -> None:
    """Compile both kernels for a layer ahead of its first adapter; slots may still be empty."""
    x_1K = module.a_CMRK.new_zeros((1, module.a_CMRK.shape[-1]))
    y_1O = module.b_CRO.new_zeros((1, sum(module.widths)))
    rows_1 = torch.zeros(1, dtype=torch.int32, device=x_1K.device)
    runs = AdapterRuns(rows_1, np.array([0, 1], np.int32), np.zeros(1, np.int32))
    _launch(module, x_1K, y_1O, runs, 1)


def _launch(
    module: AdapterModule, x_TK: torch.Tensor, y_TO: torch.Tensor, runs: AdapterRuns, rank: int
) -> None:
    _, parts, max_rank, in_features = module.a_CMRK.shape
    tile = adapter_tile(x_TK.dtype)
    if runs.tiles_B3 is None:  # once per batch, for all its layers
        runs.tiles_B3 = upload(tiles_of(runs.starts, runs.slots, tile.rows), x_TK.device)
    num_tiles, num_rows = len(runs.tiles_B3), len(runs.rows_N)
    rank = triton.cdiv(rank, _RANKS) * _RANKS
    pieces = triton.cdiv(in_features, tile.piece_k)
    shrunk_PNMR = x_TK.new_empty((pieces, num_rows, parts, rank), dtype=torch.float32)
    _shrink_kernel[(num_tiles, parts * rank // _RANKS, pieces)](
        x_TK,
        module.a_CMRK,
        module.device_ranks_CM,
        runs.rows_N,
        runs.tiles_B3,
        shrunk_PNMR,
        num_rows,
        rank,
        K=in_features,
        PARTS=parts,
        MAX_RANK=max_rank,
        PIECE_K=tile.piece_k,
        ROWS=tile.rows,
        RANKS=_RANKS,
        BLOCK_K=tile.block_k,
        PRECISION="ieee" if x_TK.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    begins = [sum(module.widths[:part]) for part in range(1, _MAX_PARTS)]
    _expand_kernel[(num_tiles, parts, triton.cdiv(max(module.widths), tile.columns))](
        shrunk_PNMR,
        module.b_CRO,
        module.device_ranks_CM,
        runs.rows_N,
        runs.tiles_B3,
        y_TO,
        num_rows,
        rank,
        OUT=y_TO.shape[1],
        SECOND=begins[0],
        THIRD=begins[1],
        PARTS=parts,
        MAX_RANK=max_rank,
        PIECES=pieces,
        ROWS=tile.rows,
        RANKS=_RANKS,
        BLOCK_O=tile.columns,
        # B's 16-bit types are exact in tf32, and A x keeps as many bits as float16 has.
        PRECISION="ieee" if x_TK.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _check(module: AdapterModule, x_TK: torch.Tensor, y_TO: torch.Tensor) -> None:
    num_slots, parts, rank, in_features = module.a_CMRK.shape
    dtype, out_features = module.a_CMRK.dtype, sum(module.widths)
    if parts != len(module.widths) or parts > _MAX_PARTS:
        raise ValueError(f"{parts} parts of {module.widths}; at most {_MAX_PARTS}")
    if module.b_CRO.shape != (num_slots, rank, out_features) or module.b_CRO.dtype != dtype:
        raise ValueError(f"b_CRO is {tuple(module.b_CRO.shape)} {module.b_CRO.dtype}")
    if not (module.a_CMRK.is_contiguous() and module.b_CRO.is_contiguous()):
        raise ValueError("adapters must be contiguous")
    for tensor, width in ((x_TK, in_features), (y_TO, out_features)):
        if tensor.shape != (len(x_TK), width) or tensor.dtype != dtype:
            raise ValueError(f"{tuple(tensor.shape)} {tensor.dtype}: not {width} {dtype}")
    if not y_TO.is_contiguous():
        raise ValueError("y_TO must be contiguous")
