"""`python -m app.bench.gpu.compile_check 80 90 100`: build every kernel for GPUs not at hand.

Drives the ordinary launchers with CPU tensors; what they would launch is compiled down to
machine code instead. Run with TRITON_INTERPRET unset.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch

from app.bench.gpu.checks import (
    SMALL_CASES,
    AttentionCase,
    attention_inputs,
    check_elementwise,
    check_quantized,
    check_rope,
)
from kernels.torch_sampling import Adjustment
from kernels.triton import logits, sampling
from kernels.triton.backend import TritonBackend
from kernels.triton.compile import CompiledKernel, compiling_for

# What distinguishes variants of the attention kernels beside the model's shape.
_CASES = (
    AttentionCase("llama", (32, 8, 128), 16, ((1023, 1), (700, 1), (0, 33))),
    AttentionCase("flash's page", (32, 8, 128), 256, ((1023, 1), (700, 1), (0, 33))),
    AttentionCase("window", (32, 8, 128), 16, ((1023, 1), (0, 33)), window=512),
    AttentionCase("float8", (32, 8, 128), 16, ((1023, 1), (0, 33)), float8=True),
    *(c for c in SMALL_CASES if c.softcap or c.pad or c.heads[2] in (80, 256)),
)
_VOCABULARY = 128_256


def compile_all(arch: int, dtype: torch.dtype = torch.bfloat16) -> list[CompiledKernel]:
    """Every kernel in the variants a Llama-like model launches; raises what the compiler does."""
    cpu, backend = torch.device("cpu"), TritonBackend()
    with compiling_for(arch) as compiled:
        for case in _CASES:
            q_TND, batch, cache = attention_inputs(case, backend, dtype, cpu)
            backend.attention(q_TND, batch, cache, case.shape)
            for with_norm in (False, True):
                list(check_rope(case, backend, dtype, cpu, with_norm))
        list(check_elementwise(backend, dtype, cpu, 3, 4096))
        for tokens in (1, 40, 80):
            list(check_quantized(dtype, cpu, tokens, (512, 256)))
        logits_RV = torch.zeros(2, _VOCABULARY)
        sampling.sample_rows(logits_RV, torch.zeros(2, 3, dtype=torch.float64))
        nothing = np.zeros(0, dtype=np.int32)
        mask_W = torch.zeros(_VOCABULARY // 32, dtype=torch.int32)
        logits.adjust(logits_RV, [Adjustment(1, nothing, nothing, ((3, 1.0),), allowed_W=mask_W)])
    return compiled


def main(arches: list[str]) -> None:
    for arch in map(int, arches or ["80", "90", "100"]):
        for kernel in compile_all(arch):
            row = {
                "arch": arch,
                "kernel": kernel.name,
                "shared_bytes": kernel.shared_bytes,
                "cubin_bytes": kernel.cubin_bytes,
                "tensor_cores": kernel.tensor_cores,
            }
            sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
