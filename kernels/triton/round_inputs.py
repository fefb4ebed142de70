"""Inputs rounded to int8 or e4m3, with a scale for each token or group of its inputs."""

import torch
import triton
import triton.language as tl

from kernels.triton.float8 import to_e4m3

_AT_ONCE = 1024  # numbers of a program, where groups are narrower
_MOST_PER_WARP = 2048  # numbers of a row that a warp keeps in registers


@triton.jit
def _round_inputs_kernel(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    FLOAT8: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """As `QuantizedWeight.round_inputs`, bit for bit. A NaN makes its scale one."""
    row = tl.program_id(0).to(tl.int64)
    group_G = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    i_W = tl.arange(0, WIDTH)
    k_GW = group_G[:, None] * GROUP + i_W[None, :]
    inside_GW = (k_GW < K) & (i_W < GROUP)[None, :]
    x_GW = tl.load(x_ptr + row * K + k_GW, mask=inside_GW, other=0.0).to(tl.float32)
    is_nan_GW = x_GW != x_GW
    x_GW = tl.where(is_nan_GW, 0.0, x_GW)
    scale_G = tl.div_rn(tl.max(tl.abs(x_GW), 1), 448.0 if FLOAT8 else 127.5)
    inverse_G = tl.where(scale_G == 0.0, 0.0, tl.div_rn(1.0, tl.where(scale_G == 0, 1.0, scale_G)))
    scaled_GW = x_GW * inverse_G[:, None]
    if FLOAT8:
        codes_GW = to_e4m3(scaled_GW)
    else:
        # The sum's last bit is worth 1: rounds to nearest, halves to even.
        nearest_GW = (scaled_GW + 12582912.0) - 12582912.0
        codes_GW = tl.minimum(tl.maximum(nearest_GW, -128.0), 127.0).to(tl.int8)
    tl.store(codes_ptr + row * K + k_GW, codes_GW, mask=inside_GW)
    has_nan_G = tl.max(is_nan_GW.to(tl.int32), 1) > 0
    scale_G = tl.where(has_nan_G, float("nan"), scale_G)
    tl.store(scale_ptr + row * NUM_GROUPS + group_G, scale_G, mask=group_G < NUM_GROUPS)


def round_inputs(
    x_TK: torch.Tensor, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (T, K) of dtype, int8 or e4m3, and float32 scales (T, G). group: inputs that share a
    scale, 0: all of a token."""
    T, K = x_TK.shape
    group = group or K
    num_groups = triton.cdiv(K, group)
    codes_TK = torch.empty((T, K), dtype=dtype, device=x_TK.device)
    scales_TG = torch.empty((T, num_groups), dtype=torch.float32, device=x_TK.device)
    is_float8 = dtype == torch.float8_e4m3fn
    width = triton.next_power_of_2(group)
    at_once = min(triton.next_power_of_2(num_groups), max(1, _AT_ONCE // width))
    _round_inputs_kernel[(T, triton.cdiv(num_groups, at_once))](
        x_TK.contiguous(),
        codes_TK.view(torch.uint8) if is_float8 else codes_TK,
        scales_TG,
        K=K,
        NUM_GROUPS=num_groups,
        GROUP=group,
        FLOAT8=is_float8,
        AT_ONCE=at_once,
        WIDTH=width,
        num_warps=min(16, max(4, width // _MOST_PER_WARP)),
        enable_fp_fusion=False,  # a product that is rounded is not part of a sum
    )
    return codes_TK, scales_TG
