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
from app.bench.gpu.checks import AttentionCase, ExpertCase, attention_inputs, expert_inputs
from app.bench.gpu.hybrid_checks import shares_launch
from app.bench.gpu.product_checks import ROUNDED_CASES
from app.bench.gpu.timing import device_s, host_s, num_rotating
from kernels.interface import Backend
from kernels.packing import pack_weight
from kernels.quantized import FLOAT8_ROUNDING
from kernels.torch.linear import TorchLinear
from kernels.triton.backend import TritonBackend
from kernels.triton.dense import MOST_TOKENS, DenseLinear, has_kernel
from kernels.triton.linear import QuantizedLinear
from kernels.triton.rounded import RoundedLinear
from kernels.triton.sampling import sample_rows

_LLAMA = (32, 8, 128)
# Outputs and inputs of a Llama-3-8B's linear layers.
_LAYERS = {
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate_up": (28_672, 4096),
    "down": (4096, 14_336),
}


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel on one kind of input, in microseconds: time_us of the device, in a graph, on
    inputs that are not in its cache; host_us of the host, to launch it."""

    kernel: str
    backend: str
    case: str
    time_us: float
    limit_us: float
    host_us: float

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
    backend: Backend, block_size: int, ceilings: Ceilings, device: torch.device
) -> Iterator[KernelTime]:
    """Time every case; on triton, those of decodes and chunks also in one launch."""
    for case in attention_cases(block_size):
        q_TND, batch, cache = attention_inputs(case, backend, torch.bfloat16, device)
        caches = [cache] + [
            attention_inputs(case, backend, torch.bfloat16, device)[2]
            for _ in range(num_rotating(_kv_bytes(case), device) - 1)
        ]
        ways = {"attention": backend}
        if type(backend) is TritonBackend and shares_launch(case, torch.bfloat16):
            ways["attention, one launch"] = TritonBackend(one_launch=True)
        for kernel, way in ways.items():
            # One batch for all: a backend derives lengths from it once, not per layer.
            works = [partial(way.attention, q_TND, batch, c, case.shape) for c in caches]
            limit_s = _attention_limit_s(case, ceilings)
            yield _timed(kernel, backend.name, case.name, works, limit_s, device)


def _timed(
    kernel: str,
    backend: str,
    case: str,
    works: Sequence[Callable[[], object]],
    limit_s: float,
    device: torch.device,
) -> KernelTime:
    times = (device_s(works, device), limit_s, host_s(works, device))
    return KernelTime(kernel, backend, case, *(1e6 * seconds for seconds in times))


def _kv_bytes(case: AttentionCase) -> int:
    _, G, D = case.heads
    return sum(2 * G * D * 2 * (start + length) for start, length in case.slices)


def _attention_limit_s(case: AttentionCase, ceilings: Ceilings) -> float:
    N, _, D = case.heads
    kv_bytes = _kv_bytes(case)
    q_bytes = sum(2 * N * D * 2 * length for _, length in case.slices)
    pairs = sum(start * n + n * (n + 1) / 2 for start, n in case.slices)
    return ceilings.limit_s(kv_bytes + q_bytes, 4 * N * D * pairs)


def time_others(backend: Backend, ceilings: Ceilings, device: torch.device) -> Iterator[KernelTime]:
    """Time norm, activation, sampling and quantized linears at a layer's sizes."""

    def row(
        kernel: str, case: str, num_bytes: float, make: Callable[[], Callable[[], object]]
    ) -> KernelTime:
        works = [make() for _ in range(num_rotating(num_bytes, device))]
        limit_s = ceilings.limit_s(num_bytes, 0.0)
        return _timed(kernel, backend.name, case, works, limit_s, device)

    for tokens in (1, 128, 2048):
        x_bytes = tokens * 4096 * 2

        def norm(tokens: int = tokens) -> Callable[[], object]:
            x, residual = (torch.randn(tokens, 4096, device=device).bfloat16() for _ in range(2))
            weight = torch.randn(4096, device=device).bfloat16()
            return partial(backend.add_rms_norm, x, residual, weight, 1e-5)

        def gate(tokens: int = tokens) -> Callable[[], object]:
            wide = torch.randn(tokens, 2 * 14_336, device=device).bfloat16()
            return partial(backend.activate, wide, "silu", gated=True)

        yield row("add_rms_norm", f"{tokens} tokens", 4 * x_bytes, norm)
        yield row("silu_mul", f"{tokens} tokens", 3 * tokens * 14_336 * 2, gate)
    for rows in (1, 32, 128):
        for name, parameters in (("greedy", (0, 0, 1, 0)), ("top 50 of 0.9", (1, 50, 0.9, 0))):

            def draw(
                rows: int = rows, parameters: tuple[float, ...] = parameters
            ) -> Callable[[], object]:
                logits = torch.randn(rows, 128_256, device=device) * 3
                packed = torch.zeros(rows, 3, dtype=torch.float64, device=device)
                packed[:, 0] = torch.rand(rows, device=device)
                packed.view(torch.float32)[:, 2:] = torch.tensor(parameters, device=device)
                return partial(sample_rows, logits, packed)

            yield row("sampling", f"{rows} rows, {name}", rows * 128_256 * 4, draw)
    yield from time_dense(ceilings, device)
    for kind in ("int8", "int4", "fp8"):
        for tokens in (1, 16, 64):

            def product(kind: str = kind, tokens: int = tokens) -> Callable[[], object]:
                weight_OK = torch.randn(14_336, 4096, device=device) / 64
                x = torch.randn(tokens, 4096, device=device).bfloat16()
                return partial(QuantizedLinear(pack_weight(weight_OK, kind), None), x)

            num_bytes = 14_336 * 4096 // (2 if kind == "int4" else 1)
            yield row(f"linear {kind}", f"{tokens} tokens", num_bytes, product)
    yield from _time_rounded(backend, ceilings, device)


def _time_rounded(
    backend: Backend, ceilings: Ceilings, device: torch.device
) -> Iterator[KernelTime]:
    """Products of 8-bit codes with rounded inputs, rounding included. The limit is that of bf16
    operations, of which 8-bit ones take half the time."""
    outputs, inputs = _LAYERS["gate_up"]
    for case in ROUNDED_CASES:
        if case.float8 and backend.unsupported_quantization(FLOAT8_ROUNDING):
            continue
        # Drawn on the host, which takes longer than all products: once for every number of tokens.
        linears = [
            RoundedLinear(case.draw(outputs, inputs), None, device)
            for _ in range(num_rotating(outputs * inputs, device))
        ]
        for tokens in (1, 16, 64, 128, 512, 2048):
            x_TK = torch.randn(tokens, inputs, device=device).bfloat16()
            num_bytes = outputs * inputs + 2 * tokens * (inputs + outputs)
            works = [partial(linear, x_TK) for linear in linears]
            limit_s = ceilings.limit_s(num_bytes, 2.0 * tokens * outputs * inputs)
            label = f"gate_up, {tokens} tokens"
            yield _timed(f"linear {case.name}", backend.name, label, works, limit_s, device)


def time_dense(ceilings: Ceilings, device: torch.device) -> Iterator[KernelTime]:
    """Time dense products by cuBLAS, and of few tokens by our kernel on GPUs that have it."""
    for layer, (outputs, inputs) in _LAYERS.items():
        for tokens in (1, 8, 16, 32, 64, 128, 512, 2048):
            yield _dense_time(False, layer, tokens, (outputs, inputs), ceilings, device)
            if tokens <= MOST_TOKENS and has_kernel(outputs, inputs, torch.bfloat16):
                yield _dense_time(True, layer, tokens, (outputs, inputs), ceilings, device)


def _dense_time(
    own: bool, layer: str, tokens: int, features: tuple[int, int], ceilings: Ceilings,
    device: torch.device,
) -> KernelTime:  # fmt: skip
    """A dense product by cuBLAS, or by the kernel for few tokens."""
    outputs, inputs = features
    x_TK = torch.randn(tokens, inputs, device=device).bfloat16()

    def make() -> Callable[[], object]:
        weight_OK = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) / 64
        if own:
            return partial(DenseLinear(weight_OK, None, inputs, outputs).multiply_few, x_TK)
        return partial(TorchLinear(weight_OK, None, inputs, outputs), x_TK)

    num_bytes = 2 * (outputs * inputs + tokens * (inputs + outputs))
    limit_s = ceilings.limit_s(num_bytes, 2.0 * tokens * outputs * inputs)
    works = [make() for _ in range(num_rotating(num_bytes, device))]
    name = "linear bf16, few tokens" if own else "linear bf16, cuBLAS"
    return _timed(name, "triton", f"{layer}, {tokens} tokens", works, limit_s, device)


def time_experts(
    backend: Backend, ceilings: Ceilings, device: torch.device
) -> Iterator[KernelTime]:
    """Time one mixture of Qwen3-30B-A3B, router included, at sizes of steps."""
    sizes = num_experts, top_k, hidden, inner = (128, 8, 2048, 768)
    expert_numbers = 3 * hidden * inner
    for tokens in (1, 32, 128, 2048):
        case = ExpertCase(f"{tokens} tokens", tokens, sizes)
        x_TH, experts = expert_inputs(case, backend, torch.bfloat16, device)
        used = num_experts * (1 - (1 - top_k / num_experts) ** tokens)  # if all are as likely
        num_bytes = 2 * (used * expert_numbers + 2 * tokens * hidden)
        limit_s = ceilings.limit_s(num_bytes, 2 * expert_numbers * tokens * top_k)
        works = [partial(backend.moe, x_TH, experts, case.form)]
        for _ in range(num_rotating(num_bytes, device) - 1):
            other = expert_inputs(case, backend, torch.bfloat16, device)
            works.append(partial(backend.moe, *other, case.form))
        yield _timed("experts", backend.name, case.name, works, limit_s, device)
