"""SiLU(gate) * up over the fused gate-and-up projection."""

import torch
import triton
import triton.language as tl

_BLOCK_I = 1024


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr: tl.tensor, out_ptr: tl.tensor, INNER: tl.constexpr, BLOCK_I: tl.constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    inside = i < INNER
    gate = tl.load(gate_up_ptr + token * 2 * INNER + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * 2 * INNER + INNER + i, mask=inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + token * INNER + i, out.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """(T, 2 I), gate first -> (T, I)."""
    T, double = gate_up_T2I.shape
    inner = double // 2
    out_TI = torch.empty((T, inner), dtype=gate_up_T2I.dtype, device=gate_up_T2I.device)
    if T:
        grid = (T, triton.cdiv(inner, _BLOCK_I))
        _silu_mul_kernel[grid](gate_up_T2I, out_TI, INNER=inner, BLOCK_I=_BLOCK_I, num_warps=4)
    return out_TI
