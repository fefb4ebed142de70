"""Linear layers whose weights and inputs both have 8 bits, multiplied as such by tensor cores.

One launch rounds x, with a scale for each token or for each group of its inputs; another
multiplies codes. int8 sums are int32 and exact, those of e4m3 float32. Where weight and inputs have
a scale a row, it is applied once, to the finished sum; otherwise to the sum of each group.

A token has the same bits alone and in any batch: K is cut into segments by the shape of the weight
alone. With few tokens each segment is a program's, with many one program takes them all, and they
are added in the same order.

Suffixes beside those of `kernels.interface`: G groups of inputs, S segments of K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.quantized import QuantizedWeight
from kernels.triton.round_inputs import round_inputs
from kernels.triton.tiles import rounded_tile, splits_to_fill

# Inputs multiplied at once; with e4m3 Hopper's tensor cores keep some 14 bits of a sum, which is
# therefore added to one in float32 after each of these blocks.
_BLOCK_K = 128
_NARROWEST = 32  # the least that a product of 8-bit numbers takes
_BLOCK_SUM = 1024


@triton.jit
def _finished(
    total_TO: tl.tensor,
    x_scale_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    t: tl.tensor,
    o: tl.tensor,
    inside_T: tl.tensor,
    inside_O: tl.tensor,
    X_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> tl.tensor:
    """The sum of all segments, by scales that are not those of groups, and with the bias; t and o
    are to be broadcast to each other."""
    y = total_TO.to(tl.float32)
    if X_GROUPS == 1:
        y *= tl.load(x_scale_ptr + t, mask=inside_T, other=0.0)
    if GROUPS == 1:
        y *= tl.load(scale_ptr + o, mask=inside_O, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + o, mask=inside_O, other=0.0).to(tl.float32)
    return y


@triton.jit(do_not_specialize=["T"])
def _rounded_linear_kernel(
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    T: tl.tensor,
    OUT: tl.constexpr,
    K: tl.constexpr,
    STEP: tl.constexpr,
    STEPS_PER_GROUP: tl.constexpr,
    X_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
) -> None:
    """STEP inputs at once, of BLOCK_K or one group's last; SEGMENT steps form a segment. SPLIT: a
    program sums one segment, unfinished, else all. WEIGHTS_FIRST: of (O, T) instead of (T, O)."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    split = tl.program_id(2)
    if WEIGHTS_FIRST:
        t = t[None, :]
        o = o[:, None]
    else:
        t = t[:, None]
        o = o[None, :]
    inside_T = t < T
    inside_O = o < OUT
    SHAPE: tl.constexpr = (BLOCK_O, BLOCK_T) if WEIGHTS_FIRST else (BLOCK_T, BLOCK_O)
    NUM_STEPS: tl.constexpr = (K + STEP - 1) // STEP
    BY_ROW: tl.constexpr = X_GROUPS == 1 and GROUPS == 1
    IS_INT: tl.constexpr = codes_ptr.dtype.element_ty == tl.int8
    SUM: tl.constexpr = tl.int32 if IS_INT else tl.float32
    PRECISE_AFTER: tl.constexpr = 0 if IS_INT else BLOCK_K
    TOTAL: tl.constexpr = SUM if BY_ROW else tl.float32
    i = tl.arange(0, BLOCK_K)
    i = i[None, :] if WEIGHTS_FIRST else i[:, None]  # beside o
    i_x = tl.trans(i)
    total = tl.zeros(SHAPE, TOTAL)
    first = split if SPLIT else 0
    last = split + 1 if SPLIT else SEGMENTS
    for segment in range(first, last):
        part = tl.zeros(SHAPE, TOTAL)
        begin = segment * SEGMENT
        for step in range(begin, tl.minimum(begin + SEGMENT, NUM_STEPS)):
            k = step * STEP + i
            k_x = step * STEP + i_x
            inside_K = k < K
            inside_K_x = k_x < K
            if STEP < BLOCK_K:
                inside_K = inside_K & (i < STEP)
                inside_K_x = inside_K_x & (i_x < STEP)
            x = tl.load(x_ptr + t.to(tl.int64) * K + k_x, mask=inside_T & inside_K_x, other=0.0)
            w = tl.load(codes_ptr + o.to(tl.int64) * K + k, mask=inside_O & inside_K, other=0.0)
            left = w if WEIGHTS_FIRST else x
            right = x if WEIGHTS_FIRST else w
            if BY_ROW:
                part = tl.dot(left, right, part, max_num_imprecise_acc=PRECISE_AFTER, out_dtype=SUM)
            else:
                group = step // STEPS_PER_GROUP
                of_group = tl.dot(
                    left, right, max_num_imprecise_acc=PRECISE_AFTER, out_dtype=SUM
                ).to(tl.float32)
                if X_GROUPS > 1:
                    of_group *= tl.load(x_scale_ptr + t * X_GROUPS + group, inside_T, 0.0)
                if GROUPS > 1:
                    of_group *= tl.load(scale_ptr + o * GROUPS + group, inside_O, 0.0)
                part += of_group
        total += part
    place = t.to(tl.int64) * OUT + o
    if SPLIT:
        tl.store(out_ptr + split.to(tl.int64) * T * OUT + place, total, mask=inside_T & inside_O)
    else:
        y = _finished(
            total, x_scale_ptr, scale_ptr, bias_ptr, t, o, inside_T, inside_O,
            X_GROUPS, GROUPS, HAS_BIAS,
        )  # fmt: skip
        tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=inside_T & inside_O)


@triton.jit
def _sum_segments_kernel(
    parts_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    OUT: tl.constexpr,
    X_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    num_rows = tl.num_programs(1)
    inside = o < OUT
    total = tl.zeros((BLOCK,), parts_ptr.dtype.element_ty)
    for segment in tl.static_range(SEGMENTS):
        total += tl.load(parts_ptr + (segment * num_rows + row) * OUT + o, mask=inside, other=0)
    y = _finished(
        total, x_scale_ptr, scale_ptr, bias_ptr, row, o, row >= 0, inside,
        X_GROUPS, GROUPS, HAS_BIAS,
    )  # fmt: skip
    tl.store(out_ptr + row * OUT + o, y.to(out_ptr.dtype.element_ty), mask=inside)


class RoundedLinear:
    """A weight of int8 or e4m3 that multiplies inputs rounded to the same type.

    Raises ValueError for 4 bits, for zero points, and for inputs by group where the weight has
    none.
    """

    def __init__(
        self, weight: QuantizedWeight, bias_O: torch.Tensor | None, device: torch.device
    ) -> None:
        if weight.bits != 8 or weight.zeros_OG is not None:
            raise ValueError("inputs are rounded only for 8-bit weights without zero points")
        if weight.input_rounding == "none" or (
            weight.input_rounding == "group" and not weight.group_size
        ):
            raise ValueError(
                f"inputs rounded by {weight.input_rounding} do not fit groups of "
                f"{weight.group_size}"
            )
        self.out_features, self.in_features = weight.values_OK.shape
        self.codes_OK = weight.values_OK.to(device).contiguous()
        self.scales_OG = weight.scales_OG.to(device, torch.float32).contiguous()
        self.bias_O = bias_O
        order_K = weight.permutation_K
        self.permutation_K = None if order_K is None else order_K.to(device, torch.int32)
        # One group is as good as none.
        self._group = weight.group_size if self.scales_OG.shape[1] > 1 else 0
        self._input_group = self._group if weight.input_rounding == "group" else 0
        self._step = self._group or _BLOCK_K
        while self._step > _BLOCK_K:
            self._step //= 2

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight with its scales and input order."""
        order = 0 if self.permutation_K is None else self.permutation_K.nbytes
        return self.codes_OK.nbytes + self.scales_OG.nbytes + order

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self._multiply(x_TK, x_TK.dtype)

    def forward_f32(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self._multiply(x_TK, torch.float32)

    def round_inputs(self, x_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes (T, K) of the weight's type, inputs in the weight's order, and float32 scales
        (T, G)."""
        if self.permutation_K is not None:
            x_TK = x_TK.index_select(1, self.permutation_K)
        return round_inputs(x_TK, self._input_group, self.codes_OK.dtype)

    def _multiply(self, x_TK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        T, num_outputs = x_TK.shape[0], self.out_features
        out_TO = torch.empty((T, num_outputs), dtype=dtype, device=x_TK.device)
        if not T:
            return out_TO
        codes_TK, x_scales_TG = self.round_inputs(x_TK)
        step, tile, first_tile = self._step, rounded_tile(T), rounded_tile(1)
        num_steps = triton.cdiv(self.in_features, step)
        wanted = splits_to_fill(triton.cdiv(num_outputs, first_tile.columns), first_tile.programs)
        segment = triton.cdiv(num_steps, min(wanted, num_steps))
        segments = triton.cdiv(num_steps, segment)
        split = segments > 1 and tile.programs > 0
        by_row = self._group == 0
        parts_STO = out_TO
        if split:
            is_int = self.codes_OK.dtype == torch.int8
            part_dtype = torch.int32 if by_row and is_int else torch.float32
            parts_STO = out_TO.new_empty((segments, T, num_outputs), dtype=part_dtype)
        scales = {"X_GROUPS": x_scales_TG.shape[1], "GROUPS": self.scales_OG.shape[1]}
        bias = x_scales_TG if self.bias_O is None else self.bias_O
        _rounded_linear_kernel[
            (
                triton.cdiv(T, tile.rows),
                triton.cdiv(num_outputs, tile.columns),
                segments if split else 1,
            )
        ](
            codes_TK,
            x_scales_TG,
            self.codes_OK,
            self.scales_OG,
            bias,
            parts_STO,
            T,
            OUT=num_outputs,
            K=self.in_features,
            STEP=step,
            STEPS_PER_GROUP=max(1, self._group // step),
            **scales,
            SEGMENT=segment,
            SEGMENTS=segments,
            SPLIT=split,
            HAS_BIAS=self.bias_O is not None,
            BLOCK_T=tile.rows,
            BLOCK_O=tile.columns,
            BLOCK_K=max(_NARROWEST, triton.next_power_of_2(step)),
            WEIGHTS_FIRST=tile.weights_first,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if split:
            _sum_segments_kernel[(triton.cdiv(num_outputs, _BLOCK_SUM), T)](
                parts_STO,
                x_scales_TG,
                self.scales_OG,
                bias,
                out_TO,
                OUT=num_outputs,
                **scales,
                SEGMENTS=segments,
                HAS_BIAS=self.bias_O is not None,
                BLOCK=_BLOCK_SUM,
                num_warps=4,
            )
        return out_TO
