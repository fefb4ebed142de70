"""Times of single kernels on full-size inputs: attention backends side by side, and the rest.

A row says how long the kernel ran, and its limit: the longer of what its bytes and its operations
would take at the measured ceilings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from app.bench.ceilings import Ceilings
from app.bench.gpu.checks import AttentionCase, attention_inputs
from app.bench.gpu.timing import median_s
from kernels.interface import Backend
from kernels.triton.linear import QuantizedLinear
from kernels.triton.packing import pack_weight
from kernels.triton.sampling import sample_rows

_LLAMA = (32, 8, 128)


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel on one input; times in microseconds of device time."""

    kernel: str
    backend: str
    case: str
    time_us: float
    limit_us: float

    @property
    def efficiency(self) -> float:
        return self.limit_us / self.time_us


def attention_cases(block_size: int) -> tuple[AttentionCase, ...]:
    """Decodes, chunks and hybrids of a Llama-3-8B or Mistral-7B layer."""
    decode, chunk = (1023, 1), (0, 512)
    return (
        AttentionCase("decode 1 at 1k", _LLAMA, block_size, (decode,)),
        AttentionCase("decode 32 at 1k", _LLAMA, block_size, (decode,) * 32),
        AttentionCase("decode 128 at 1k", _LLAMA, block_size, (decode,) * 128),
        AttentionCase("decode 1 at 32k", _LLAMA, block_size, ((32_767, 1),)),
        AttentionCase("decode 32 at 8k", _LLAMA, block_size, ((8191, 1),) * 32),
        AttentionCase("chunk 512", _LLAMA, block_size, (chunk,)),
        AttentionCase("chunk 2048", _LLAMA, block_size, ((0, 2048),)),
        AttentionCase("chunk 512 behind 7680", _LLAMA, block_size, ((7680, 512),)),
        AttentionCase("chunk 448 and 64 decodes", _LLAMA, block_size, (decode,) * 64 + ((0, 448),)),
        AttentionCase(
            "chunk 1984 and 64 decodes", _LLAMA, block_size, (decode,) * 64 + ((0, 1984),)
        ),
    )


def time_attention(
    backends: Sequence[tuple[Backend, int]], ceilings: Ceilings, device: torch.device
) -> Iterator[KernelTime]:
    """Every case on every (backend, block size)."""
    for backend, block_size in backends:
        for case in attention_cases(block_size):
            q_TND, batch, cache = attention_inputs(case, backend, torch.bfloat16, device)
            work = partial(backend.attention, q_TND, batch, cache, case.shape)
            seconds = median_s(work, device)
            limit_s = _attention_limit_s(case, ceilings)
            yield KernelTime("attention", backend.name, case.name, 1e6 * seconds, 1e6 * limit_s)


def _attention_limit_s(case: AttentionCase, ceilings: Ceilings) -> float:
    N, G, D = case.heads
    kv_bytes = sum(2 * G * D * 2 * (start + length) for start, length in case.slices)
    q_bytes = sum(2 * N * D * 2 * length for _, length in case.slices)
    pairs = sum(start * n + n * (n + 1) / 2 for start, n in case.slices)
    return ceilings.limit_s(kv_bytes + q_bytes, 4 * N * D * pairs)


def time_others(backend: Backend, ceilings: Ceilings, device: torch.device) -> Iterator[KernelTime]:
    """Norm, activation, sampling and quantised products at a layer's sizes."""

    def row(kernel: str, case: str, num_bytes: float, work: Callable[[], object]) -> KernelTime:
        seconds = median_s(work, device)
        limit_s = ceilings.limit_s(num_bytes, 0.0)
        return KernelTime(kernel, backend.name, case, 1e6 * seconds, 1e6 * limit_s)

    for tokens in (1, 128, 2048):
        x, residual = (torch.randn(tokens, 4096, device=device).bfloat16() for _ in range(2))
        weight = torch.randn(4096, device=device).bfloat16()
        wide = torch.randn(tokens, 2 * 14_336, device=device).bfloat16()
        norm = partial(backend.add_rms_norm, x, residual, weight, 1e-5)
        yield row("add_rms_norm", f"{tokens} tokens", 4 * x.nbytes, norm)
        gate = partial(backend.silu_mul, wide)
        yield row("silu_mul", f"{tokens} tokens", 1.5 * wide.nbytes, gate)
    for rows in (1, 32, 128):
        logits = torch.randn(rows, 128_256, device=device) * 3
        for name, parameters in (("greedy", (0, 0, 1, 0)), ("top 50 of 0.9", (1, 50, 0.9, 0))):
            packed = torch.zeros(rows, 3, dtype=torch.float64, device=device)
            packed[:, 0] = torch.rand(rows, device=device)
            packed.view(torch.float32)[:, 2:] = torch.tensor(parameters, device=device)
            draw = partial(sample_rows, logits, packed)
            yield row("sampling", f"{rows} rows, {name}", logits.nbytes, draw)
    weight_OK = torch.randn(14_336, 4096, device=device) / 64
    for kind in ("int8", "int4", "fp8"):
        linear = QuantizedLinear(pack_weight(weight_OK, kind), None)
        for tokens in (1, 16, 64):
            x = torch.randn(tokens, 4096, device=device).bfloat16()
            multiply = partial(linear, x)
            yield row(f"linear {kind}", f"{tokens} tokens", linear.packed.num_bytes, multiply)
