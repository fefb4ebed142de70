"""Linear layers on packed weights; dense ones are torch's (cuBLAS).

A decode step is bound by streaming the weights, which quantization shortens; a prefill chunk is
bound by arithmetic, so above `_MAX_FUSED_TOKENS` the weight is dequantized once for cuBLAS.
"""

import torch
import triton
import triton.language as tl

from kernels.torch.linear import TorchQuantizedLinear
from kernels.triton.float8 import from_e4m3
from kernels.triton.tiles import splits_to_fill

_MAX_FUSED_TOKENS = 64
_BLOCK_O = 64


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
) -> tl.tensor:
    """(T, O) float32: what one group of input features adds to the outputs o. Codes less their zero
    are exact in every type of x."""
    place_O = o * NUM_GROUPS + group
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
        low = (codes & 15).to(tl.int8) - 8
        high = (codes >> 4).to(tl.int8) - 8
        if HAS_ZEROS:
            zero_O1 = tl.load(zero_ptr + place_O, mask=inside_O, other=0)[:, None]
            low -= zero_O1
            high -= zero_O1
        dtype = x_low.dtype
        part_TO = tl.dot(x_low, tl.trans(low.to(dtype)), input_precision=PRECISION)
        part_TO = tl.dot(x_high, tl.trans(high.to(dtype)), part_TO, input_precision=PRECISION)
    else:
        i = tl.arange(0, WIDTH)
        x = _inputs(x_row_T1, inside_T, group, i, K, GROUP, WIDTH)
        column = group * WIDTH + i
        codes = tl.load(code_row_O1 + column[None, :], mask=inside_O[:, None], other=0)
        if KIND == "fp8":
            weight = from_e4m3(codes).to(x.dtype)
        elif HAS_ZEROS:
            zero_O = tl.load(zero_ptr + place_O, mask=inside_O, other=0)
            weight = (codes.to(tl.int16) - zero_O[:, None].to(tl.int16)).to(x.dtype)
        else:
            weight = codes.to(x.dtype)
        part_TO = tl.dot(x, tl.trans(weight), input_precision=PRECISION)
    return part_TO * scale_O[None, :]


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
    acc_TO = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
    for group in range(first, last):
        acc_TO += group_product(
            x_row_T1, inside_T, codes_ptr, scale_ptr, zero_ptr, o, inside_O, group,
            K, NUM_GROUPS, KIND, GROUP, WIDTH, HAS_ZEROS, PRECISION,
        )  # fmt: skip
    if HAS_BIAS and SPLITS == 1:
        acc_TO += tl.load(bias_ptr + o, mask=inside_O, other=0.0).to(tl.float32)[None, :]
    row = (split.to(tl.int64) * T + t[:, None]) * OUT
    mask_TO = inside_T[:, None] & inside_O[None, :]
    tl.store(out_ptr + row + o[None, :], acc_TO.to(out_ptr.dtype.element_ty), mask=mask_TO)


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
) -> None:
    o = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    place = o * NUM_GROUPS + group
    i = tl.arange(0, WIDTH)
    if KIND == "int4":
        HALF: tl.constexpr = WIDTH // 2
        pair = tl.load(codes_ptr + place * HALF + i % HALF)
        value = tl.where(i < HALF, pair & 15, pair >> 4).to(tl.float32) - 8
    else:
        code = tl.load(codes_ptr + place * WIDTH + i)
        value = from_e4m3(code) if KIND == "fp8" else code.to(tl.float32)
    if HAS_ZEROS:
        value -= tl.load(zero_ptr + place).to(tl.float32)
    value *= tl.load(scale_ptr + place).to(tl.float32)
    k = group * GROUP + i
    mask = (k < K) & (i < GROUP)
    tl.store(out_ptr + o * K + k, value.to(out_ptr.dtype.element_ty), mask=mask)


class QuantizedLinear(TorchQuantizedLinear):
    """A weight-only quantized layer; activations keep their dtype."""

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        packed = self.packed
        size = (self.out_features, self.in_features)
        weight_OK = torch.empty(size, dtype=dtype, device=packed.codes.device)
        num_groups = packed.scales.shape[1]
        _dequantize_kernel[(self.out_features, num_groups)](
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
            num_warps=1,
        )
        return weight_OK

    def _multiply(self, x_TK: torch.Tensor) -> torch.Tensor:
        if x_TK.shape[0] > _MAX_FUSED_TOKENS:
            return super()._multiply(x_TK)
        return self._fused(x_TK)

    def _fused(self, x_TK: torch.Tensor) -> torch.Tensor:
        T = x_TK.shape[0]
        num_outputs = self.out_features
        if not T:
            return torch.empty((0, num_outputs), dtype=x_TK.dtype, device=x_TK.device)
        packed = self.packed
        num_groups = packed.scales.shape[1]
        block_t = max(16, triton.next_power_of_2(T))
        num_blocks = triton.cdiv(num_outputs, _BLOCK_O)
        splits = min(num_groups, splits_to_fill(num_blocks))
        # Split-K: partial sums are added in a fixed order, so results are deterministic.
        part_dtype = torch.float32 if splits > 1 else x_TK.dtype
        parts_STO = torch.empty((splits, T, num_outputs), dtype=part_dtype, device=x_TK.device)
        _quantized_linear_kernel[(num_blocks, triton.cdiv(T, block_t), splits)](
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
            BLOCK_T=block_t,
            BLOCK_O=_BLOCK_O,
            SPLITS=splits,
            HAS_BIAS=self.bias_O is not None,
            PRECISION="ieee" if x_TK.dtype == torch.float32 else "tf32",
            num_warps=4,
            num_stages=3,
        )
        if splits == 1:
            return parts_STO[0]
        out_TO = parts_STO.sum(0)
        if self.bias_O is not None:
            out_TO += self.bias_O
        return out_TO.to(x_TK.dtype)
