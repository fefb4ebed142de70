"""What single kernels are compiled to for GPUs that are not at hand.

`python -m tests.kernels.triton.compiled` prints it as JSON; kernels are not interpreted there.
"""

from __future__ import annotations

import json
import sys

import torch

from app.bench.gpu.checks import AttentionCase, attention_inputs
from app.bench.gpu.reduce_checks import draw, make_ranks
from kernels.packing import pack_weight
from kernels.triton.backend import TritonBackend
from kernels.triton.compile import CompiledKernel, compiling_for
from kernels.triton.linear import QuantizedLinear
from kernels.triton.tiles import most_fused_tokens

CPU, HALF = torch.device("cpu"), torch.bfloat16


def attention(arch: int, case: AttentionCase, dtype: torch.dtype) -> list[CompiledKernel]:
    backend = TritonBackend()
    q_TND, batch, cache = attention_inputs(case, backend, dtype, CPU)
    with compiling_for(arch) as compiled:
        backend.attention(q_TND, batch, cache, case.shape)
    return compiled


def widest_heads() -> dict[str, int]:
    """Shared bytes by kernel, in float32, where the rows of K and V are twice as long."""
    case = AttentionCase("", (2, 1, 256), 16, ((33, 1), (60, 20)))
    return {kernel.name: kernel.shared_bytes for kernel in attention(86, case, torch.float32)}


def largest_packed_tiles() -> list[int]:
    """Shared bytes of as many tokens as are multiplied in one launch."""
    with compiling_for(86) as compiled:
        for dtype in (HALF, torch.float32):
            linear = QuantizedLinear(pack_weight(torch.zeros(64, 2048), "int8"), None)
            linear(torch.zeros(most_fused_tokens(dtype), 2048, dtype=dtype))
    return [k.shared_bytes for k in compiled if k.name == "_quantized_linear_kernel"]


def sum_over_ranks() -> str:
    size = (8, 3, 4096)
    [mine, *_] = make_ranks(*size, HALF, CPU)
    (part_TH, *_), residual_TH, weight_H = draw(*size, HALF, CPU)
    with compiling_for(90) as compiled:
        TritonBackend().reduce_add_rms_norm(part_TH, residual_TH, weight_H, 1e-5, mine)
    return compiled[0].ptx


def float8_conversions() -> dict[int, dict[str, bool]]:
    """Whether each kernel has the GPU's instruction that converts fp8, by compute capability."""
    case = AttentionCase("", (2, 1, 32), 16, ((40, 1), (0, 33)), float8=True)
    return {
        arch: {kernel.name: "e4m3x2" in kernel.ptx for kernel in attention(arch, case, HALF)}
        for arch in (80, 90)
    }


if __name__ == "__main__":
    found = (widest_heads, largest_packed_tiles, sum_over_ranks, float8_conversions)
    json.dump({function.__name__: function() for function in found}, sys.stdout)
