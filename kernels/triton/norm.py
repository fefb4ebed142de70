"""RMSNorm, alone and fused with the residual sum: one program per token."""

import torch
import triton
import triton.language as tl


@triton.jit
def store_rounded(row_ptr: tl.tensor, x_H: tl.tensor, h: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Write a row; returns it as stored, rounded to the row's dtype, in float32."""
    rounded_H = x_H.to(row_ptr.dtype.element_ty)
    tl.store(row_ptr + h, rounded_H, mask=inside)
    return rounded_H.to(tl.float32)


@triton.jit
def normalized(x_H: tl.tensor, weight_H: tl.tensor, eps: tl.tensor, H: tl.constexpr) -> tl.tensor:
    """The RMS norm of a row in float32; x is zero from H on."""
    inverse_rms = tl.rsqrt(tl.sum(x_H * x_H, 0) / H + eps)
    return x_H * inverse_rms * weight_H.to(tl.float32)


@triton.jit
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    inside = h < H
    x_H = tl.load(x_ptr + token * H + h, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x_H += tl.load(residual_ptr + token * H + h, mask=inside, other=0.0).to(tl.float32)
        # The norm is computed from the residual as stored.
        x_H = store_rounded(residual_ptr + token * H, x_H, h, inside)
    weight_H = tl.load(weight_ptr + h, mask=inside, other=0.0)
    store_rounded(out_ptr + token * H, normalized(x_H, weight_H, eps, H), h, inside)


def num_warps_for(width: int) -> int:
    # About 16 elements per thread keeps several 16-byte loads in flight without spilling.
    return min(16, max(1, width // 512))


def rms_norm(
    x_TH: torch.Tensor,
    weight_H: torch.Tensor,
    eps: float,
    residual_TH: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm of x, or of `residual += x` (in place) when a residual is given. Any 2-D shape."""
    T, H = x_TH.shape
    out_TH = torch.empty_like(x_TH)
    if T:
        block = triton.next_power_of_2(H)
        _rms_norm_kernel[(T,)](
            x_TH,
            x_TH if residual_TH is None else residual_TH,
            weight_H,
            out_TH,
            eps,
            H=H,
            BLOCK_H=block,
            ADD=residual_TH is not None,
            num_warps=num_warps_for(block),
        )
    return out_TH
