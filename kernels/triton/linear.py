"""Linear layers on packed weights; dense ones are torch's (cuBLAS).

A decode step is bound by streaming the weights, which quantization shortens; a prefill chunk is
bound by arithmetic, so above `most_fused_tokens` the weight is dequantized once for cuBLAS.
"""

import torch
import triton
import triton.language as tl

from kernels.torch.linear import TorchQuantizedLinear
from kernels.triton.tiles import most_fused_tokens, packed_tile, splits_to_fill
from kernels.triton.unpack import unpack_fp8, unpack_int4, unpack_int8

_BLOCK_SUM = 1024
_DEQUANTIZED_AT_ONCE = 1024  # codes of one row


@triton.jit
def _inputs(
    x_row_T1: tl.tensor,
    inside_T: tl.tensor,
    group: tl.tensor,
    i: tl.tensor,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """x of the features i of a group, 0 beyond its end."""
    k = group * GROUP + i
    inside_K = k < K
    if WIDTH > GROUP:
        inside_K = inside_K & (i < GROUP)
    return tl.load(x_row_T1 + k[None, :], mask=inside_T[:, None] & inside_K[None, :], other=0.0)


@triton.jit
def group_product(
    x_row_T1: tl.tensor,
    inside_T: tl.tensor,
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    o: tl.tensor,
    inside_O: tl.tensor,
    group: tl.tensor,
    K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    PRECISION: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr = False,
) -> tl.tensor:
    """(T, O) float32, or with WEIGHTS_FIRST (O, T): what one group of input features adds to the
    outputs o. Codes less their zero are exact in every type of x."""
    place_O = o * NUM_GROUPS + group
    zero_O1 = tl.zeros((1, 1), tl.int8)
    if HAS_ZEROS:
        zero_O1 = tl.load(zero_ptr + place_O, mask=inside_O, other=0)[:, None]
    scale_O = tl.load(scale_ptr + place_O, mask=inside_O, other=0.0).to(tl.float32)
    code_row_O1 = codes_ptr + o[:, None].to(tl.int64) * (
        NUM_GROUPS * (WIDTH // 2 if KIND == "int4" else WIDTH)
    )
    if KIND == "int4":
        HALF: tl.constexpr = WIDTH // 2
        i = tl.arange(0, HALF)
        x_low = _inputs(x_row_T1, inside_T, group, i, K, GROUP, WIDTH)
        x_high = _inputs(x_row_T1, inside_T, group, HALF + i, K, GROUP, WIDTH)
        column = group * HALF + i
        codes = tl.load(code_row_O1 + column[None, :], mask=inside_O[:, None], other=0)
        low, high = unpack_int4(codes, zero_O1, x_low)
        if WEIGHTS_FIRST:
            part = tl.dot(low, tl.trans(x_low), input_precision=PRECISION)
            part = tl.dot(high, tl.trans(x_high), part, input_precision=PRECISION)
        else:
            part = tl.dot(x_low, tl.trans(low), input_precision=PRECISION)
            part = tl.dot(x_high, tl.trans(high), part, input_precision=PRECISION)
    else:
        i = tl.arange(0, WIDTH)
        x = _inputs(x_row_T1, inside_T, group, i, K, GROUP, WIDTH)
        column = group * WIDTH + i
        codes = tl.load(code_row_O1 + column[None, :], mask=inside_O[:, None], other=0)
        weight = unpack_fp8(codes, x) if KIND == "fp8" else unpack_int8(codes, zero_O1, x)
        if WEIGHTS_FIRST:
            part = tl.dot(weight, tl.trans(x), input_precision=PRECISION)
        else:
            part = tl.dot(x, tl.trans(weight), input_precision=PRECISION)
    return part * (scale_O[:, None] if WEIGHTS_FIRST else scale_O[None, :])


@triton.jit(do_not_specialize=["T"])
def _quantized_linear_kernel(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    T: tl.tensor,
    OUT: tl.constexpr,
    K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
) -> None:
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    split = tl.program_id(2)
    inside_O = o < OUT
    inside_T = t < T
    x_row_T1 = x_ptr + t[:, None].to(tl.int64) * K
    groups_per_split: tl.constexpr = (NUM_GROUPS + SPLITS - 1) // SPLITS
    first = split * groups_per_split
    last = tl.minimum(first + groups_per_split, NUM_GROUPS)
    if WEIGHTS_FIRST:
        acc = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    else:
        acc = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
    for group in range(first, last):
        acc += group_product(
            x_row_T1, inside_T, codes_ptr, scale_ptr, zero_ptr, o, inside_O, group,
            K, NUM_GROUPS, KIND, GROUP, WIDTH, HAS_ZEROS, PRECISION, WEIGHTS_FIRST,
        )  # fmt: skip
    if HAS_BIAS and SPLITS == 1:
        bias_O = tl.load(bias_ptr + o, mask=inside_O, other=0.0).to(tl.float32)
        acc += bias_O[:, None] if WEIGHTS_FIRST else bias_O[None, :]
    row_T = (split.to(tl.int64) * T + t) * OUT
    if WEIGHTS_FIRST:
        place = row_T[None, :] + o[:, None]
        inside = inside_T[None, :] & inside_O[:, None]
    else:
        place = row_T[:, None] + o[None, :]
        inside = inside_T[:, None] & inside_O[None, :]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sum_parts_kernel(
    parts_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    OUT: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    num_rows = tl.num_programs(1)
    inside = o < OUT
    acc = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        acc += tl.load(parts_ptr + (split * num_rows + row) * OUT + o, mask=inside, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + o, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * OUT + o, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dequantize_kernel(
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    out_ptr: tl.tensor,
    K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    # Programs of a row side by side, all in the grid's first dimension: a head has more rows than
    # the second may have.
    per_row: tl.constexpr = (NUM_GROUPS + AT_ONCE - 1) // AT_ONCE
    row = (tl.program_id(0) // per_row).to(tl.int64)
    g = tl.program_id(0) % per_row * AT_ONCE + tl.arange(0, AT_ONCE)
    inside_G = g < NUM_GROUPS
    place_G = row * NUM_GROUPS + g
    scale_G1 = tl.load(scale_ptr + place_G, mask=inside_G, other=0.0).to(tl.float32)[:, None]
    like = scale_G1.to(tl.float16)  # in which codes are exact
    zero_G1 = tl.zeros((1, 1), tl.int8)
    if HAS_ZEROS:
        zero_G1 = tl.load(zero_ptr + place_G, mask=inside_G, other=0)[:, None]
    STORED: tl.constexpr = WIDTH // 2 if KIND == "int4" else WIDTH
    i = tl.arange(0, STORED)
    code_ptr = codes_ptr + place_G[:, None] * STORED + i[None, :]
    codes = tl.load(code_ptr, mask=inside_G[:, None], other=0)
    k = g[:, None] * GROUP + i[None, :]
    inside = inside_G[:, None] & (k < K) & (i < GROUP)[None, :]
    out_row_ptr = out_ptr + row * K
    if KIND == "int4":
        low, high = unpack_int4(codes, zero_G1, like)
        tl.store(
            out_row_ptr + k,
            (low.to(tl.float32) * scale_G1).to(out_ptr.dtype.element_ty),
            mask=inside,
        )
        inside = inside_G[:, None] & (k + STORED < K) & (i + STORED < GROUP)[None, :]
        value = high.to(tl.float32) * scale_G1
        k += STORED
    elif KIND == "fp8":
        value = unpack_fp8(codes, like).to(tl.float32) * scale_G1
    else:
        value = unpack_int8(codes, zero_G1, like).to(tl.float32) * scale_G1
    tl.store(out_row_ptr + k, value.to(out_ptr.dtype.element_ty), mask=inside)


class QuantizedLinear(TorchQuantizedLinear):
    """A weight-only quantized layer; activations keep their dtype."""

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        packed = self.packed
        size = (self.out_features, self.in_features)
        weight_OK = torch.empty(size, dtype=dtype, device=packed.codes.device)
        num_groups = packed.scales.shape[1]
        at_once = min(_DEQUANTIZED_AT_ONCE // packed.width, triton.next_power_of_2(num_groups))
        _dequantize_kernel[(self.out_features * triton.cdiv(num_groups, at_once),)](
            packed.codes,
            packed.scales,
            packed.codes if packed.zeros is None else packed.zeros,
            weight_OK,
            K=self.in_features,
            NUM_GROUPS=num_groups,
            KIND=packed.kind,
            GROUP=packed.group,
            WIDTH=packed.width,
            HAS_ZEROS=packed.zeros is not None,
            AT_ONCE=at_once,
            num_warps=4,
        )
        return weight_OK

    def _multiply(self, x_TK: torch.Tensor) -> torch.Tensor:
        if x_TK.shape[0] > most_fused_tokens(x_TK.dtype):
            return super()._multiply(x_TK)
        return self._fused(x_TK)

    def _fused(self, x_TK: torch.Tensor) -> torch.Tensor:
        T = x_TK.shape[0]
        num_outputs = self.out_features
        if not T:
            return torch.empty((0, num_outputs), dtype=x_TK.dtype, device=x_TK.device)
        packed = self.packed
        num_groups = packed.scales.shape[1]
        tile = packed_tile(T, packed.kind, x_TK.dtype)
        num_blocks = triton.cdiv(num_outputs, tile.columns)
        splits = min(num_groups, splits_to_fill(num_blocks, tile.programs))
        # Split-K: partial sums are added in a fixed order, so results are deterministic.
        part_dtype = torch.float32 if splits > 1 else x_TK.dtype
        parts_STO = torch.empty((splits, T, num_outputs), dtype=part_dtype, device=x_TK.device)
        _quantized_linear_kernel[(num_blocks, 1, splits)](
            x_TK,
            packed.codes,
            packed.scales,
            packed.codes if packed.zeros is None else packed.zeros,
            x_TK if self.bias_O is None else self.bias_O,
            parts_STO,
            T,
            OUT=num_outputs,
            K=self.in_features,
            NUM_GROUPS=num_groups,
            KIND=packed.kind,
            GROUP=packed.group,
            WIDTH=packed.width,
            HAS_ZEROS=packed.zeros is not None,
            BLOCK_T=tile.rows,
            BLOCK_O=tile.columns,
            SPLITS=splits,
            HAS_BIAS=self.bias_O is not None,
            PRECISION="ieee" if x_TK.dtype == torch.float32 else "tf32",
            WEIGHTS_FIRST=tile.weights_first,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if splits == 1:
            return parts_STO[0]
        out_TO = torch.empty((T, num_outputs), dtype=x_TK.dtype, device=x_TK.device)
        _sum_parts_kernel[(triton.cdiv(num_outputs, _BLOCK_SUM), T)](
            parts_STO,
            x_TK if self.bias_O is None else self.bias_O,
            out_TO,
            OUT=num_outputs,
            SPLITS=splits,
            HAS_BIAS=self.bias_O is not None,
            BLOCK=_BLOCK_SUM,
            num_warps=4,
        )
        return out_TO
