"""Linear layers with weight-only quantization; dense ones are torch's (cuBLAS).

A decode step is bound by streaming the weights, which quantization shortens; a prefill chunk is
bound by arithmetic, so above `_MAX_FUSED_TOKENS` the weight is dequantized once for cuBLAS.
"""

import torch
import triton
import triton.language as tl
from torch.nn import functional

from kernels.triton.float8 import from_e4m3
from kernels.triton.packing import GROUP, PackedWeight
from kernels.triton.tiles import splits_to_fill

_MAX_FUSED_TOKENS = 64
_BLOCK_O = 64


@triton.jit
def _unpack(
    codes_ptr: tl.tensor,
    row_O: tl.tensor,
    inside_O: tl.tensor,
    column: tl.tensor,
    STRIDE: tl.constexpr,
) -> tl.tensor:
    offsets = row_O[:, None].to(tl.int64) * STRIDE + column[None, :]
    return tl.load(codes_ptr + offsets, mask=inside_O[:, None], other=0)


@triton.jit(do_not_specialize=["T"])
def _quantized_linear_kernel(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    T: tl.tensor,
    OUT: tl.constexpr,
    K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP_K: tl.constexpr,
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
    x_row = x_ptr + t[:, None].to(tl.int64) * K
    groups_per_split: tl.constexpr = (NUM_GROUPS + SPLITS - 1) // SPLITS
    first = split * groups_per_split
    last = tl.minimum(first + groups_per_split, NUM_GROUPS)
    acc_TO = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
    for group in range(first, last):
        k = group * GROUP_K
        scale_O = tl.load(scale_ptr + o * NUM_GROUPS + group, mask=inside_O, other=0.0)
        if KIND == "int4":
            HALF: tl.constexpr = GROUP_K // 2
            i = tl.arange(0, HALF)
            low_mask = inside_T[:, None] & (k + i < K)[None, :]
            high_mask = inside_T[:, None] & (k + HALF + i < K)[None, :]
            x_low = tl.load(x_row + (k + i)[None, :], mask=low_mask, other=0.0)
            x_high = tl.load(x_row + (k + HALF + i)[None, :], mask=high_mask, other=0.0)
            codes = _unpack(codes_ptr, o, inside_O, group * HALF + i, NUM_GROUPS * HALF)
            low = ((codes & 15).to(tl.int8) - 8).to(x_low.dtype)
            high = ((codes >> 4).to(tl.int8) - 8).to(x_low.dtype)
            part_TO = tl.dot(x_low, tl.trans(low), input_precision=PRECISION)
            part_TO = tl.dot(x_high, tl.trans(high), part_TO, input_precision=PRECISION)
        else:
            i = tl.arange(0, GROUP_K)
            mask = inside_T[:, None] & (k + i < K)[None, :]
            x = tl.load(x_row + (k + i)[None, :], mask=mask, other=0.0)
            codes = _unpack(codes_ptr, o, inside_O, k + i, NUM_GROUPS * GROUP_K)
            weight = from_e4m3(codes).to(x.dtype) if KIND == "fp8" else codes.to(x.dtype)
            part_TO = tl.dot(x, tl.trans(weight), input_precision=PRECISION)
        acc_TO += part_TO * scale_O[None, :]
    if HAS_BIAS and SPLITS == 1:
        acc_TO += tl.load(bias_ptr + o, mask=inside_O, other=0.0).to(tl.float32)[None, :]
    row = (split.to(tl.int64) * T + t[:, None]) * OUT
    mask_TO = inside_T[:, None] & inside_O[None, :]
    tl.store(out_ptr + row + o[None, :], acc_TO.to(out_ptr.dtype.element_ty), mask=mask_TO)


@triton.jit
def _dequantize_kernel(
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP_K: tl.constexpr,
) -> None:
    o = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    scale = tl.load(scale_ptr + o * NUM_GROUPS + group)
    k = group * GROUP_K + tl.arange(0, GROUP_K)
    if KIND == "int4":
        HALF: tl.constexpr = GROUP_K // 2
        i = tl.arange(0, GROUP_K)
        code = tl.load(codes_ptr + (o * NUM_GROUPS + group) * HALF + i % HALF)
        nibble = tl.where(i < HALF, code & 15, code >> 4)
        value = (nibble.to(tl.int32) - 8).to(tl.float32)
    else:
        code = tl.load(codes_ptr + o * NUM_GROUPS * GROUP_K + k)
        value = from_e4m3(code) if KIND == "fp8" else code.to(tl.float32)
    tl.store(out_ptr + o * K + k, (value * scale).to(out_ptr.dtype.element_ty), mask=k < K)


class QuantizedLinear:
    """A weight-only quantized layer (int8, int4 or fp8); activations keep their dtype."""

    def __init__(self, packed: PackedWeight, bias_O: torch.Tensor | None) -> None:
        self.packed = packed
        self.bias_O = bias_O
        self.in_features = packed.in_features
        self.out_features = packed.out_features

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        if x_TK.shape[0] > _MAX_FUSED_TOKENS:
            return functional.linear(x_TK, self.dequantize(x_TK.dtype), self.bias_O)
        return self._fused(x_TK)

    def forward_f32(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self(x_TK)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The dense weight (O, K) in `dtype`."""
        packed = self.packed
        size = (self.out_features, self.in_features)
        weight_OK = torch.empty(size, dtype=dtype, device=packed.codes.device)
        num_groups = packed.scales.shape[1]
        _dequantize_kernel[(self.out_features, num_groups)](
            packed.codes,
            packed.scales,
            weight_OK,
            K=self.in_features,
            NUM_GROUPS=num_groups,
            KIND=packed.kind,
            GROUP_K=GROUP,
            num_warps=1,
        )
        return weight_OK

    def _fused(self, x_TK: torch.Tensor) -> torch.Tensor:
        T = x_TK.shape[0]
        num_outputs = self.out_features
        if not T:
            return torch.empty((0, num_outputs), dtype=x_TK.dtype, device=x_TK.device)
        num_groups = self.packed.scales.shape[1]
        block_t = max(16, triton.next_power_of_2(T))
        num_blocks = triton.cdiv(num_outputs, _BLOCK_O)
        splits = min(num_groups, splits_to_fill(num_blocks))
        # Split-K: partial sums are added in a fixed order, so results are deterministic.
        part_dtype = torch.float32 if splits > 1 else x_TK.dtype
        parts_STO = torch.empty((splits, T, num_outputs), dtype=part_dtype, device=x_TK.device)
        _quantized_linear_kernel[(num_blocks, triton.cdiv(T, block_t), splits)](
            x_TK,
            self.packed.codes,
            self.packed.scales,
            x_TK if self.bias_O is None else self.bias_O,
            parts_STO,
            T,
            OUT=num_outputs,
            K=self.in_features,
            NUM_GROUPS=num_groups,
            KIND=self.packed.kind,
            GROUP_K=GROUP,
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
