"""Shared by the attention kernels: their constants, loads of K and V tiles through a block table,
and online softmax. Shape suffixes in all of these: R rows, each a query head of a token, K KV
positions of a tile, D head dimension."""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.interface import AttentionShape
from kernels.triton.cache import PagedKV
from kernels.triton.float8 import BY_ARITHMETIC, BY_INSTRUCTION, from_e4m3, kind_of
from kernels.triton.tiles import target_arch

LOG2_E = tl.constexpr(1.4426950408889634)
# Not -inf: exp2(-inf - -inf) of a fully masked row would be NaN. What such a tile adds is
# multiplied by exp2(MASKED - score) = 0 at the first unmasked score.
MASKED = tl.constexpr(-1.0e30)


def constants(shape: AttentionShape, layer: PagedKV, dtype: torch.dtype) -> dict[str, Any]:
    """The constants that attention kernels take beside their tiles, for q of this dtype."""
    return {
        "G": shape.num_kv_heads,
        "GROUP": shape.num_heads // shape.num_kv_heads,
        "D": shape.head_dim,
        "BLOCK_D": triton.next_power_of_2(shape.head_dim),
        "PAGE": layer.block_size,
        "WINDOW": shape.window_code,
        "SOFTCAP": shape.softcap or 0.0,
        "SINKS": shape.sinks_N is not None,
        "ALIBI": 0 if shape.alibi_NP is None else shape.alibi_NP.stride(0),
        "FLOAT8": kind_of(layer.is_float8, target_arch()),
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }


@triton.jit
def kv_rows(
    table_ptr: tl.tensor,
    position_K: tl.tensor,
    inside_K: tl.tensor,
    head: tl.tensor,
    PAGE: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
) -> tl.tensor:
    """Offset into the cache, in elements, of each kv position's row for one head."""
    block = tl.load(table_ptr + position_K // PAGE, mask=inside_K, other=0).to(tl.int64)
    return ((block * PAGE + position_K % PAGE) * G + head) * D


@triton.jit
def aligned_rows(
    table_ptr: tl.tensor,
    begin: tl.tensor,
    column_K: tl.tensor,
    inside_K: tl.tensor,
    head: tl.tensor,
    PAGE: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,
) -> tl.tensor:
    """`kv_rows` of the tile at `begin`, a multiple of BLOCK_K. Where tiles and pages divide each
    other, what depends on the column alone is the same in all tiles, and leaves their loop."""
    if PAGE % BLOCK_K == 0:
        block = tl.load(table_ptr + begin // PAGE).to(tl.int64)
        row_K = ((block * PAGE + begin % PAGE) * G + head) * D + column_K * (G * D)
    else:
        if BLOCK_K % PAGE == 0:
            page_K = begin // PAGE + column_K // PAGE
            in_page_K = column_K % PAGE
        else:
            page_K = (begin + column_K) // PAGE
            in_page_K = (begin + column_K) % PAGE
        if WHOLE:
            block_K = tl.load(table_ptr + page_K)
        else:
            block_K = tl.load(table_ptr + page_K, mask=inside_K, other=0)
        row_K = block_K.to(tl.int64) * (PAGE * G * D) + ((in_page_K * G + head) * D)
    return row_K


@triton.jit
def load_tile(
    cache_ptr: tl.tensor,
    row_K: tl.tensor,
    inside_K: tl.tensor,
    like: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FLOAT8: tl.constexpr,
    WHOLE: tl.constexpr = False,
) -> tl.tensor:
    """(BLOCK_K, BLOCK_D) of K or V in the dtype of `like`; zeros outside, where WHOLE says that
    no position is. FLOAT8: see `float8`."""
    d = tl.arange(0, BLOCK_D)
    tile_ptr = cache_ptr + row_K[:, None] + d[None, :]
    if WHOLE and D == BLOCK_D:
        tile = tl.load(tile_ptr)
    else:
        mask = (d < D)[None, :] if WHOLE else inside_K[:, None] & (d < D)[None, :]
        tile = tl.load(tile_ptr, mask=mask, other=0)
    if FLOAT8 == BY_INSTRUCTION:
        tile = tile.to(tl.float8e4nv, bitcast=True).to(like.dtype)
    elif FLOAT8 == BY_ARITHMETIC:
        tile = from_e4m3(tile).to(like.dtype)
    return tile


@triton.jit
def scores(
    q_RD: tl.tensor,
    k_KD: tl.tensor,
    scale: tl.tensor,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Base-2 logits q k^T * scale * log2(e), soft-capped first if SOFTCAP > 0."""
    product = tl.dot(q_RD, tl.trans(k_KD), input_precision=PRECISION)
    if SOFTCAP > 0:
        # tanh(x) = 2 sigmoid(2x) - 1, which every Triton target and the interpreter have.
        capped = 2.0 * tl.sigmoid(product * (scale * 2.0 / SOFTCAP)) - 1.0
        score = capped * (SOFTCAP * LOG2_E)
    else:
        score = product * (scale * LOG2_E)
    return score


@triton.jit
def alibi(
    alibi_ptr: tl.tensor,
    head_R: tl.tensor,
    inside_R: tl.tensor,
    position_R: tl.tensor,
    position_K: tl.tensor,
    inside_K: tl.tensor,
    STRIDE: tl.constexpr,
) -> tl.tensor:
    """What ALiBi adds to base-2 logits: the key's bias less that of the row's own position, of
    which there may be one for all rows."""
    row_ptr_R = alibi_ptr + head_R * STRIDE
    own_R = tl.load(row_ptr_R + position_R, mask=inside_R, other=0.0)
    mask = inside_R[:, None] & inside_K[None, :]
    key_RK = tl.load(row_ptr_R[:, None] + position_K[None, :], mask=mask, other=0.0)
    return (key_RK - own_R[:, None]) * LOG2_E


@triton.jit
def accumulate(
    score_RK: tl.tensor,
    v_KD: tl.tensor,
    row_max_R: tl.tensor,
    row_sum_R: tl.tensor,
    acc_RD: tl.tensor,
    PRECISION: tl.constexpr,
    factor: tl.tensor = 1.0,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One step of online softmax over a tile of scores, which times `factor`, a positive number,
    are base-2 logits: scaled here, they cost one fused multiply-add each."""
    new_max_R = tl.maximum(row_max_R, tl.max(score_RK, 1) * factor)
    p_RK = tl.exp2(score_RK * factor - new_max_R[:, None])
    rescale_R = tl.exp2(row_max_R - new_max_R)
    row_sum_R = row_sum_R * rescale_R + tl.sum(p_RK, 1)
    acc_RD = acc_RD * rescale_R[:, None]
    acc_RD = tl.dot(p_RK.to(v_KD.dtype), v_KD, acc_RD, input_precision=PRECISION)
    return new_max_R, row_sum_R, acc_RD
