"""`legato bench compile`: build every Triton kernel for GPUs that are not at hand.

Drives the ordinary launchers with CPU tensors; what they would launch is compiled down to
machine code instead. Run with TRITON_INTERPRET unset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
import torch
import typer

from app.bench.report import MeasurementError, make_report, publish
from app.bench.terminal import Json, Out, output, progress, table

if TYPE_CHECKING:  # Triton is optional; the command says so where it is missing
    from app.bench.gpu.adapter_checks import AdapterCase
    from app.bench.gpu.checks import AttentionCase, ExpertCase
    from app.bench.gpu.recurrence_checks import RecurrenceCase
    from kernels.triton.compile import CompiledKernel

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
_LLAMA = (32, 8, 128)
_VOCABULARY = 128_256


def attention_cases() -> list[AttentionCase]:
    """Cases for the variants of the attention kernels, beside the model's shape."""
    from app.bench.gpu.checks import SMALL_CASES, AttentionCase

    hybrid = ((1023, 1), (700, 1), (0, 33))
    return [
        AttentionCase("llama", _LLAMA, 16, hybrid),
        AttentionCase("flash's page", _LLAMA, 256, hybrid),
        AttentionCase("window", _LLAMA, 16, ((1023, 1), (0, 33)), window=512),
        AttentionCase("float8", _LLAMA, 16, ((1023, 1), (0, 33)), float8=True),
        AttentionCase("ALiBi", (32, 32, 64), 16, hybrid, alibi=True),
        *(
            case
            for case in SMALL_CASES
            if case.softcap or (case.pad and not case.alibi) or case.heads[2] in (80, 256)
        ),
    ]


def expert_cases() -> list[ExpertCase]:
    """Mixtures of Qwen3, dense and int4, and gpt-oss, of few experts but whole rows."""
    from app.bench.gpu.checks import ExpertCase
    from app.bench.gpu.stored_case import StoredCase
    from kernels.layer_form import LayerForm

    clamped = LayerForm(1e-5, activation="clamped_swiglu")
    return [
        ExpertCase("qwen3", 3, (8, 2, 2048, 768)),
        ExpertCase("qwen3, int4", 3, (8, 2, 2048, 768), stored=StoredCase(4, 128, has_zeros=True)),
        ExpertCase("gpt-oss", 3, (4, 2, 2880, 720), clamped, biased=True),
    ]


def adapter_cases() -> list[AdapterCase]:
    """The linear layers of Llama 3 8B, and one of odd sizes."""
    from app.bench.gpu.adapter_checks import AdapterCase

    return [
        AdapterCase(name, (0,), (8,), rank, in_features, widths)
        for name, rank, in_features, widths in (
            ("qkv", 64, 4096, (4096, 1024, 1024)),
            ("down", 64, 14_336, (4096,)),
            ("odd", 8, 99, (131, 7)),
        )
    ]


def recurrence_cases() -> list[RecurrenceCase]:
    """Qwen3-Next's layers, and the longest keys."""
    from app.bench.gpu.recurrence_checks import RecurrenceCase
    from kernels.recurrence import Recurrence

    return [
        RecurrenceCase("qwen3-next", Recurrence(16, 32, 128, 128, delta=True), (1, 70), plain=True),
        RecurrenceCase("keys of 256", Recurrence(4, 4, 256, 256, delta=True), (1, 70)),
    ]


def compile_all(
    arch: int, dtype: torch.dtype = torch.bfloat16, *, once: bool = False
) -> list[CompiledKernel]:
    """Every kernel in the variants a Llama-like model launches; raises what the compiler does.

    once: see `compiling_for`."""
    from app.bench.gpu.adapter_checks import check_adapters
    from app.bench.gpu.checks import (
        attention_inputs,
        check_elementwise,
        check_experts,
        check_rope,
    )
    from app.bench.gpu.product_checks import (
        ROUNDED_CASES,
        STORED_CASES,
        check_dense,
        check_quantized,
        check_rounded,
        check_stored,
    )
    from app.bench.gpu.recurrence_checks import recurrence_inputs, run_recurrence
    from app.bench.gpu.reduce_checks import draw, make_ranks
    from kernels.sampling import Adjustment
    from kernels.triton import blocks, logits, sampling
    from kernels.triton.backend import TritonBackend
    from kernels.triton.cache import allocate
    from kernels.triton.compile import compiling_for
    from kernels.triton.dense import TILES as DENSE_TILES
    from kernels.triton.tiles import LEAST_ROUNDED_FLOAT8_ARCH

    cpu, backend = torch.device("cpu"), TritonBackend()
    with compiling_for(arch, once) as compiled:
        for case in attention_cases():
            q_TND, batch, cache = attention_inputs(case, backend, dtype, cpu)
            for one_launch in (False, True):
                way = TritonBackend(one_launch)
                way.attention(q_TND, batch, cache, case.drawn_shape(cpu))
            for with_norm in (False, True):
                list(check_rope(case, backend, dtype, cpu, with_norm))
        list(check_elementwise(backend, dtype, cpu, 3, 4096))
        for num_ranks, width in ((2, 4096), (8, 8192)):
            [mine, *_] = make_ranks(num_ranks, 3, width, dtype, cpu)
            (part_TH, *_), residual_TH, weight_H = draw(num_ranks, 3, width, dtype, cpu)
            backend.reduce_add_rms_norm(part_TH, residual_TH, weight_H, 1e-5, mine)
        for mixture in expert_cases():
            check_experts(mixture, backend, dtype, cpu)
        for adapted in adapter_cases():
            check_adapters(adapted, backend, dtype, cpu)
        for recurrent in recurrence_cases():
            run_recurrence(recurrent, recurrence_inputs(recurrent, dtype, cpu), backend)
        for tokens in DENSE_TILES:
            check_dense(dtype, cpu, tokens, (512, 256), biased=True)
        for tokens in (1, 40, 80, 200):
            list(check_quantized(dtype, cpu, tokens, (512, 256)))
            for stored in STORED_CASES:
                check_stored(stored, dtype, cpu, tokens, (512, 256))
            for rounded in ROUNDED_CASES:
                if arch >= LEAST_ROUNDED_FLOAT8_ARCH or not rounded.float8:
                    list(check_rounded(rounded, dtype, cpu, tokens, (4096, 256)))
        blocks.warm(allocate(1, 1, 16, attention_cases()[0].shape, dtype, cpu))
        logits_RV = torch.zeros(2, _VOCABULARY)
        sampling.sample_rows(logits_RV, torch.zeros(2, 3, dtype=torch.float64))
        nothing = np.zeros(0, dtype=np.int32)
        mask_W = torch.zeros(_VOCABULARY // 32, dtype=torch.int32)
        logits.adjust(logits_RV, [Adjustment(1, nothing, nothing, ((3, 1.0),), allowed_W=mask_W)])
    return compiled


def command(
    context: typer.Context,
    arches: Annotated[
        list[int] | None,
        typer.Argument(help="Compute capabilities; 80, 86, 89, 90, 100 and 120 if absent."),
    ] = None,
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="One variant of each kernel for each combination of argument types."
        ),
    ] = False,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Build every Triton kernel for GPUs that are not at hand; needs no GPU."""
    try:
        import triton  # noqa: F401
    except ImportError:
        raise MeasurementError("Triton is not installed: pip install triton") from None
    kernels = [
        {
            "arch": arch,
            "kernel": kernel.name,
            "shared_bytes": kernel.shared_bytes,
            "cubin_bytes": len(kernel.cubin),
            "stack_bytes": kernel.stack_bytes,
            "tensor_cores": kernel.tensor_cores,
            "operands": kernel.operands,
        }
        for arch in progress(arches or ARCHITECTURES, "compiling")
        for kernel in compile_all(arch, once=once)
    ]
    publish(make_report(context, {"kernels": kernels}), as_json, out)
    if not as_json:
        rows = [
            (
                *(str(k["kernel"]), str(k["tensor_cores"] or ""), str(k["arch"])),
                *(str(k[f"{what}_bytes"]) for what in ("shared", "cubin", "stack")),
            )
            for k in kernels
        ]
        columns = ("kernel", "tensor cores", "arch", "shared bytes", "cubin bytes", "stack bytes")
        output.print(table("compiled", columns, rows, num_words=2))
