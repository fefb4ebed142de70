"""Quantization of floating-point weights to int8 and int4 at load, for the CPU kernels (linear.py).

Shape suffixes: O output features, K input features, G groups of inputs sharing a scale.
"""

from __future__ import annotations

import ctypes
import re

import torch

from kernels.cpu import library
from kernels.cpu.library import FLOAT_CODES
from kernels.quantized import InputRounding, QuantizedWeight

GROUP_SIZES = (32, 64, 128)
_DEFAULT_GROUPS = {"int8": 0, "w8a8": 0, "int4": 32, "w4a8": 64}
# Clipping ratios tried per group: fractions of the largest magnitude.
_CLIP_RATIOS = tuple(1.0 - 0.04 * step for step in range(8))


def parse(quantization: str) -> tuple[int, int, InputRounding]:
    """ "int8", "int8-g64", "w4a8-g128" -> bits, group and rounding of inputs; group 0 is one scale
    per row."""
    match = re.fullmatch(r"(int8|int4|w8a8|w4a8)(?:-g(\d+))?", quantization)
    if match is None:
        raise ValueError(
            'quantization must be "none", "int8", "int4", "w8a8" or "w4a8", the last four perhaps '
            f"with a group size (-gN): {quantization}"
        )
    bits = 4 if "4" in match[1] else 8
    rounding: InputRounding = "group" if match[1].endswith("a8") else "none"
    if match[2] is None:
        return bits, _DEFAULT_GROUPS[match[1]], rounding
    group = int(match[2])
    if group not in GROUP_SIZES:
        raise ValueError(f"group size must be one of {GROUP_SIZES}, not {group}")
    return bits, group, rounding


def quantize(weight_OK: torch.Tensor, quantization: str) -> QuantizedWeight:
    """Round to nearest, with the scale of least mean squared error for each group (or row).

    weight_OK: float32, bfloat16 or float16 on the CPU. Computed in C++ where the library loads,
    else by `quantize_reference`; the numbers are the same.
    """
    if library.load() is None or weight_OK.dtype not in FLOAT_CODES:
        return quantize_reference(weight_OK, quantization)
    bits, group, rounding = parse(quantization)
    weight_OK = weight_OK if weight_OK.stride(1) == 1 else weight_OK.contiguous()
    out_features, in_features = weight_OK.shape
    width = group or max(in_features, 1)
    clips = torch.tensor(_clips(group))
    values_OK = torch.empty(out_features, in_features, dtype=torch.int8)
    scales_OG = torch.zeros(out_features, max(1, -(-in_features // width)))
    int64, pointer, whole = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
    run = library.function(
        "legato_quantize",
        *(whole, whole, int64, int64, pointer, int64, whole, int64, whole),
        *(pointer, whole, pointer, pointer),
    )
    out_of_memory = run(
        *(FLOAT_CODES[weight_OK.dtype], out_features, in_features),
        *(weight_OK.data_ptr(), weight_OK.stride(0), bits, width, int(group > 0)),
        *(clips.data_ptr(), len(clips), values_OK.data_ptr(), scales_OG.data_ptr()),
    )
    if out_of_memory:
        raise MemoryError(f"no memory to quantize a {out_features} x {in_features} weight")
    return QuantizedWeight(values_OK, scales_OG, bits, group, input_rounding=rounding)


def quantize_reference(weight_OK: torch.Tensor, quantization: str) -> QuantizedWeight:
    """The same in torch: float32 value by value, errors summed in float64."""
    bits, group, rounding = parse(quantization)
    out_features, in_features = weight_OK.shape
    width = group or max(in_features, 1)
    num_groups = max(1, -(-in_features // width))
    w_OGk = torch.zeros(out_features, num_groups * width)
    w_OGk[:, :in_features] = weight_OK.float()
    w_OGk = w_OGk.view(out_features, num_groups, width)
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1

    # Two scales are tried per clipping ratio: one (perhaps negative) that gives the range's
    # additional lowest value to the side of larger magnitude, and one for the symmetric part of the
    # range.
    above_OG, below_OG = w_OGk.amax(dim=2).clamp_(min=0), (-w_OGk).amax(dim=2).clamp_(min=0)
    extreme_OG = torch.where(above_OG >= below_OG, above_OG, -below_OG)
    full_scales = (extreme_OG / low, torch.maximum(above_OG, below_OG) / high)
    best_error_OG = torch.full_like(above_OG, float("inf"), dtype=torch.float64)
    best_scale_OG = torch.zeros_like(above_OG)
    for clip in torch.tensor(_clips(group)):
        for full_scale_OG in full_scales:
            scale_OG = full_scale_OG * clip
            if group:
                scale_OG = scale_OG.half().float()
            rounded = _to_grid(w_OGk, scale_OG, low, high)
            error_OG = (rounded * scale_OG[..., None] - w_OGk).square().sum(2, dtype=torch.float64)
            better = error_OG < best_error_OG
            best_error_OG = torch.where(better, error_OG, best_error_OG)
            best_scale_OG = torch.where(better, scale_OG, best_scale_OG)
    values = _to_grid(w_OGk, best_scale_OG, low, high).to(torch.int8)
    values_OK = values.view(out_features, -1)[:, :in_features].contiguous()
    return QuantizedWeight(values_OK, best_scale_OG, bits, group, input_rounding=rounding)


def _to_grid(w_OGk: torch.Tensor, scale_OG: torch.Tensor, low: int, high: int) -> torch.Tensor:
    inverse_OG = torch.where(scale_OG == 0, 0.0, 1.0 / scale_OG)
    return (w_OGk * inverse_OG[..., None]).round().clamp(low, high)


def _clips(group: int) -> tuple[float, ...]:
    return _CLIP_RATIOS if group else (1.0,)
