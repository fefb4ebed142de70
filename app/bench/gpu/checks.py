"""Every GPU kernel against its float64 reference, on random data with poisoned outputs.

The same list runs in the tests (small, under Triton's interpreter when there is no GPU) and in
the bench (full size, on the GPU).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from app.bench.gpu.geometry import hybrid_batch, padded
from app.bench.gpu.stored_case import StoredCase
from kernels.interface import AttentionShape, Backend, Batch
from kernels.layer_form import LayerForm
from kernels.layer_weights import Experts, Linear
from kernels.torch.moe import route
from kernels.triton import reference
from kernels.triton.backend import paged
from kernels.triton.cache import FLOAT8, PagedKV
from kernels.triton.grouped import grouped

# Relative errors in the norm that arithmetic of each kind may make.
BOUNDS = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One kernel on one input.

    error: relative, in the norm; infinite where a number is missing or was overwritten.
    """

    name: str
    dtype: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """slices: (start, length) each. pad: (tokens, slices) added, as a captured graph does."""

    name: str
    heads: tuple[int, int, int]  # N, G, D
    block_size: int
    slices: tuple[tuple[int, int], ...]
    window: int | None = None
    softcap: float | None = None
    float8: bool = False
    pad: tuple[int, int] | None = None
    sinks: bool = False
    alibi: bool = False
    chunked: bool = False

    @property
    def shape(self) -> AttentionShape:
        N, G, D = self.heads
        return AttentionShape(N, G, D, D**-0.5, self.window, self.softcap, self.chunked)

    def drawn_shape(self, device: torch.device) -> AttentionShape:
        """The shape with random sinks and ALiBi slopes, where the case has some."""
        sinks_N, alibi_NP = None, None
        if self.sinks:
            sinks_N = 2 * torch.randn(self.heads[0], device=device)
        if self.alibi:
            positions_P = torch.arange(max(map(sum, self.slices)), device=device)
            alibi_NP = torch.rand(self.heads[0], 1, device=device) * positions_P
        return replace(self.shape, sinks_N=sinks_N, alibi_NP=alibi_NP)


_MIXED = ((0, 1), (64, 1), (150, 1), (0, 20), (40, 70), (7, 1))
SMALL_CASES = (
    AttentionCase("hybrid, group of 2", (4, 2, 64), 16, _MIXED),
    AttentionCase("hybrid, group of 3", (9, 3, 32), 16, _MIXED),
    AttentionCase("one kv head, odd head and page", (4, 1, 80), 7, _MIXED),
    AttentionCase("no grouping, page of 256", (2, 2, 128), 256, _MIXED),
    AttentionCase("head of 256", (2, 1, 256), 256, ((33, 1), (60, 20))),
    AttentionCase("sliding window", (4, 2, 64), 16, _MIXED, window=37),
    AttentionCase("chunked windows", (4, 2, 64), 16, _MIXED, window=37, chunked=True),
    AttentionCase("softcap", (4, 2, 64), 16, _MIXED, softcap=20.0),
    AttentionCase("sinks, window", (4, 2, 64), 16, _MIXED, window=37, sinks=True),
    AttentionCase("sinks, long", (8, 1, 64), 32, ((700, 1), (3, 1), (300, 1)), sinks=True),
    AttentionCase("ALiBi", (3, 3, 64), 7, _MIXED, alibi=True),
    AttentionCase("ALiBi, group of 3, window", (9, 3, 32), 16, _MIXED, window=37, alibi=True),
    AttentionCase("ALiBi, long", (6, 2, 16), 32, ((700, 1), (3, 1)), alibi=True),
    AttentionCase("ALiBi, captured", (2, 2, 32), 16, _MIXED, pad=(40, 3), alibi=True),
    AttentionCase("float8 cache", (4, 2, 64), 16, _MIXED, float8=True),
    AttentionCase("decodes only, long", (8, 1, 64), 32, ((700, 1), (3, 1), (300, 1))),
    AttentionCase("decodes only, long, window", (8, 1, 64), 32, ((700, 1), (3, 1)), window=300),
    AttentionCase("chunk only", (4, 2, 64), 16, ((0, 100),)),
    AttentionCase("captured decodes", (4, 2, 64), 16, ((5, 1), (90, 1), (31, 1)), pad=(1, 1)),
    AttentionCase("captured hybrid", (4, 2, 64), 16, _MIXED, pad=(40, 3)),
    AttentionCase("captured, chunks first", (4, 2, 64), 16, ((9, 30), (70, 1), (0, 3)), pad=(9, 5)),
)
_LLAMA = (32, 8, 128)
_BEHIND = ((2047, 1),) * 16 + ((512, 500),)
FULL_CASES = (
    AttentionCase("32 decodes at 1k", _LLAMA, 16, ((1023, 1),) * 32),
    AttentionCase("decode at 100k", _LLAMA, 16, ((99_999, 1),)),
    AttentionCase("chunk 2048 behind 6144", _LLAMA, 16, ((6144, 2048),)),
    AttentionCase("chunk and decodes", _LLAMA, 256, _BEHIND),
    AttentionCase("chunk and decodes, float8", _LLAMA, 64, _BEHIND, float8=True),
    AttentionCase("window", _LLAMA, 256, ((8000, 1),) * 4 + ((7000, 512),), window=4096),
)


_GATED_SILU = LayerForm(1e-5)
_GPT_OSS = LayerForm(1e-5, activation="clamped_swiglu")


@dataclass(frozen=True, slots=True)
class ExpertCase:
    """sizes: experts, of which a token has top_k, hidden and inner size. chosen: how many of the
    experts any token is routed to; None for all. stored: weights of this form; None for dense."""

    name: str
    tokens: int
    sizes: tuple[int, int, int, int]  # E, K, H, I
    form: LayerForm = _GATED_SILU
    biased: bool = False
    chosen: int | None = None
    stored: StoredCase | None = None


SMALL_EXPERTS = (
    ExpertCase("one token", 1, (4, 1, 64, 32)),
    ExpertCase("blocks of one row", 2, (64, 8, 64, 32)),
    ExpertCase("odd sizes", 63, (5, 3, 100, 36), biased=True),
    ExpertCase("full blocks, all to two experts", 128, (6, 2, 64, 32), chosen=2),
    ExpertCase("clamped swiglu, biases", 65, (8, 4, 96, 72), _GPT_OSS, biased=True),
    ExpertCase("clamped swiglu, one expert", 70, (4, 1, 96, 72), _GPT_OSS, True, 1),
    ExpertCase("gelu", 33, (7, 2, 64, 40), LayerForm(1e-5, activation="gelu")),
    ExpertCase("gelu by tanh", 33, (7, 2, 64, 40), LayerForm(1e-5, activation="gelu_tanh")),
    ExpertCase("no gate", 20, (4, 2, 64, 40), LayerForm(1e-5, activation="relu", gated=False)),
    ExpertCase("many blocks", 200, (64, 8, 64, 32)),
    ExpertCase(
        "int4 with zeros", 65, (8, 4, 96, 72), _GPT_OSS, True, stored=StoredCase(4, 32, True)
    ),
    ExpertCase("int4, symmetric", 33, (6, 2, 260, 128), stored=StoredCase(4, 128)),
    ExpertCase("int8 with zeros", 63, (5, 3, 100, 36), stored=StoredCase(8, 24, True)),
    ExpertCase("int8 by row", 5, (5, 3, 100, 36), stored=StoredCase(8, 0)),
)
FULL_EXPERTS = (
    ExpertCase("mixtral, 40 tokens", 40, (8, 2, 4096, 14_336)),
    ExpertCase("gpt-oss, 300 tokens", 300, (32, 4, 2880, 2880), _GPT_OSS, biased=True),
    ExpertCase("qwen3, 2048 tokens", 2048, (128, 8, 2048, 768)),
    ExpertCase("qwen3, 2048 tokens to 8 experts", 2048, (128, 8, 2048, 768), chosen=8),
)


@contextlib.contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Fill uninitialized tensors with NaN, to reveal elements that no kernel wrote."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def attention_inputs(
    case: AttentionCase, backend: Backend, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, Batch, PagedKV]:
    """Random q, the case's batch, and a cache full of random numbers."""
    starts, lengths = zip(*case.slices, strict=True)
    batch, num_blocks = hybrid_batch(starts, lengths, case.block_size, device)
    kv_dtype = FLOAT8 if case.float8 else dtype
    [layer] = backend.allocate_kv(1, num_blocks, case.block_size, case.shape, kv_dtype, device)
    cache = paged(layer)
    if case.float8:
        cache.k_scale, cache.v_scale = 0.5, 0.25
    for stored in (cache.keys, cache.values):
        values = torch.randn(stored.shape, device=device)
        stored.copy_((2 * values).to(FLOAT8).view(torch.uint8) if case.float8 else values)
    num_tokens = sum(lengths) + (case.pad[0] if case.pad else 0)
    if case.pad:
        batch = padded(batch, num_tokens, len(starts) + case.pad[1], 2 * batch.max_kv_length)
    q_TND = torch.randn(num_tokens, case.heads[0], case.heads[2], device=device).to(dtype)
    return q_TND, batch, cache


def check_attention(
    case: AttentionCase, backend: Backend, dtype: torch.dtype, device: torch.device
) -> CheckResult:
    q_TND, batch, cache = attention_inputs(case, backend, dtype, device)
    shape = case.drawn_shape(device)
    with poisoned_outputs():
        out = backend.attention(q_TND, batch, cache, shape)
    real = sum(length for _, length in case.slices)
    expected = reference.attention(q_TND, batch, cache, shape)
    error = reference.relative_error(out[:real], expected[:real])
    name = f"{backend.name} attention: {case.name}"
    return _result(name, dtype, error)


def check_elementwise(
    backend: Backend, dtype: torch.dtype, device: torch.device, tokens: int, width: int
) -> Iterator[CheckResult]:
    """Check norm, norm with residual, and SiLU-multiply."""
    x, residual = (torch.randn(tokens, width, device=device).to(dtype) for _ in range(2))
    wide_weight = torch.randn(width, device=device)
    weight = wide_weight.to(dtype)
    with poisoned_outputs():
        normed = backend.rms_norm(x, weight, 1e-5)
        wide_normed = backend.rms_norm(x, wide_weight, 1e-5)
        total = residual.clone()
        fused = backend.add_rms_norm(x, total, weight, 1e-5)
        gated = backend.activate(torch.cat((x, residual), 1), "silu", gated=True)
    pairs = {
        "rms_norm": (normed, reference.rms_norm(x, weight, 1e-5)),
        "rms_norm of float32": (wide_normed, reference.rms_norm(x, wide_weight, 1e-5)),
        "add_rms_norm, residual": (total, x.double() + residual.double()),
        "add_rms_norm, norm": (fused, reference.rms_norm(total, weight, 1e-5)),
        "silu_mul": (gated, reference.silu_mul(torch.cat((x, residual), 1))),
    }
    for name, (out, expected) in pairs.items():
        error = reference.relative_error(out, expected)
        yield _result(f"{backend.name} {name} {tokens}x{width}", dtype, error)


def check_rope(
    case: AttentionCase,
    backend: Backend,
    dtype: torch.dtype,
    device: torch.device,
    with_norm: bool,
    norms_last: bool = False,
) -> Iterator[CheckResult]:
    """Check rotation, q/k norm and cache writes, and that nothing else in the cache changed."""
    shape = replace(case.shape, norms_last=norms_last)
    _, batch, cache = attention_inputs(case, backend, dtype, device)
    before = reference.cached_pair(cache)
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    qkv = torch.randn(batch.positions_T.shape[0], width, device=device).to(dtype)
    angles = torch.randn(batch.max_kv_length, shape.head_dim // 2, device=device)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    q_norm = torch.randn(shape.head_dim, device=device).to(dtype) if with_norm else None
    k_norm = torch.randn(shape.head_dim, device=device).to(dtype) if with_norm else None
    with poisoned_outputs():
        q = backend.rope_and_cache(qkv, cos_sin, batch, cache, shape, q_norm, k_norm, 1e-6)
    expected = reference.rope(qkv, cos_sin, batch, shape, q_norm, k_norm, 1e-6)
    real = batch.slot_mapping_T >= 0
    slots = batch.slot_mapping_T[real].long()
    untouched = torch.ones(before[0].shape[0], dtype=torch.bool, device=device)
    untouched[slots] = False
    name = f"{backend.name} rope: {case.name}{', q/k norm' if with_norm else ''}"
    yield _result(f"{name}, q", dtype, reference.relative_error(q[real], expected[0][real]))
    for part, stored, old, wanted in zip(
        "kv", reference.cached_pair(cache), before, expected[1:], strict=True
    ):
        error = reference.relative_error(stored[slots], wanted[real])
        if not torch.equal(stored[untouched], old[untouched]):
            error = math.inf
        result = _result(f"{name}, {part}", dtype, error)
        # float8 keeps 3 bits behind the leading one: half a step of 2**-3, root mean square.
        yield replace(result, bound=0.04) if case.float8 else result


def expert_inputs(
    case: ExpertCase, backend: Backend, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, Experts]:
    """Random x (T, H) and experts of the case."""
    num_experts, top_k, hidden, inner = case.sizes

    def linear(outputs: int, inputs: int) -> Linear:
        bias = torch.randn(outputs, device=device).to(dtype) if case.biased else None
        if case.stored is not None:
            return backend.pack_quantized([case.stored.draw(outputs, inputs)], bias, dtype, device)
        weight = torch.randn(outputs, inputs, device=device) / math.sqrt(inputs)
        return backend.pack_linear(weight.to(dtype), bias)

    refused_E = torch.zeros(num_experts, device=device, dtype=dtype)
    refused_E[case.chosen or num_experts :] = -1000
    router_EH = torch.randn(num_experts, hidden, device=device).to(dtype)
    wide = inner * (2 if case.form.gated else 1)
    experts = Experts(
        backend.pack_linear(router_EH, refused_E),
        [linear(wide, hidden) for _ in range(num_experts)],
        [linear(hidden, inner) for _ in range(num_experts)],
        top_k,
        renormalize=True,
    )
    return 2 * torch.randn(case.tokens, hidden, device=device).to(dtype), experts


def check_experts(
    case: ExpertCase, backend: Backend, dtype: torch.dtype, device: torch.device
) -> CheckResult:
    """A mixture against its experts in float64, for the same routing."""
    x, experts = expert_inputs(case, backend, dtype, device)
    layers = grouped(experts)
    assert layers is not None
    with poisoned_outputs():
        out = backend.moe(x, experts, case.form)
    expected = reference.experts(x, *route(x, experts), layers, case.form)
    error = reference.relative_error(out, expected)
    return _result(f"{backend.name} experts: {case.name}", dtype, error)


def _result(name: str, dtype: torch.dtype, error: float) -> CheckResult:
    return CheckResult(name, str(dtype).removeprefix("torch."), error, BOUNDS[dtype])
