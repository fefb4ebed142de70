"""`legato bench kernels attention`: attention and elementwise kernels against the machine's limits.

Attention goes from layer to layer, over more cache than the processor holds; its bytes are K, V
and activations, its FLOPs those of visible positions. How samples become figures:
`app.bench.kernels.timing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated

import numpy as np
import torch
import typer

from app.bench.kernels.timing import (
    CACHE_BYTES,
    COLUMNS,
    KernelCase,
    figures_of,
    measure_cases,
    timed,
)
from app.bench.report import make_report, publish
from app.bench.terminal import Json, Out, console, output, table
from kernels.cpu import library, sampling
from kernels.cpu.backend import CpuBackend
from kernels.interface import AttentionShape, Batch, KVLayer
from kernels.sampling import SamplingRows

SHAPE = AttentionShape(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125)  # 135M Llama
HIDDEN, INNER, VOCABULARY, BLOCK_SIZE = 576, 1536, 49_152, 16
MAX_LAYERS = 60
CPU = torch.device("cpu")

Slices = list[tuple[int, int]]  # (start, number of tokens), decodes first
STEPS: dict[str, Slices] = {
    "decode 1 at 256": [(255, 1)],
    "decode 8 at 256": [(255, 1)] * 8,
    "decode 32 at 256": [(255, 1)] * 32,
    "decode 1 at 3000": [(2999, 1)],
    "decode 16 at 3000": [(2999, 1)] * 16,
    "prefill 512": [(0, 512)],
    "prefill 480 behind 2500": [(2500, 480)],
    "hybrid 32 at 256 + 480": [(255, 1)] * 32 + [(0, 480)],
}


def kernel_case(
    name: str, num_bytes: float, flops: float, calls: Sequence[Callable[[], object]]
) -> KernelCase:
    """A case whose calls repeat the same operation on different memory."""
    return KernelCase({"case": name}, num_bytes, flops, partial(timed, calls))


def make_batch(slices: Slices, generator: torch.Generator) -> tuple[Batch, int]:
    """A batch over shuffled blocks, and its number of blocks."""
    counts = [-(-(start + length) // BLOCK_SIZE) for start, length in slices]
    order = torch.randperm(sum(counts), generator=generator).to(torch.int32)
    block_tables_SB = torch.zeros((len(slices), max(counts)), dtype=torch.int32)
    positions, slots, used = [], [], 0
    for row, ((start, length), count) in enumerate(zip(slices, counts, strict=True)):
        block_tables_SB[row, :count] = order[used : used + count]
        used += count
        where = torch.arange(start, start + length)
        positions.append(where)
        slots.append(block_tables_SB[row, where // BLOCK_SIZE] * BLOCK_SIZE + where % BLOCK_SIZE)
    starts_S = torch.tensor([start for start, _ in slices], dtype=torch.int32)
    lengths_S = torch.tensor([length for _, length in slices], dtype=torch.int32)
    return Batch(
        positions_T=torch.cat(positions).to(torch.int32),
        query_starts_S1=torch.cat((torch.zeros(1), lengths_S.cumsum(0))).to(torch.int32),
        starts_S=starts_S,
        lengths_S=lengths_S,
        block_tables_SB=block_tables_SB,
        slot_mapping_T=torch.cat(slots).to(torch.int32),
        num_decodes=sum(length == 1 for _, length in slices),
        max_length=int(lengths_S.max()),
        max_kv_length=int((starts_S + lengths_S).max()),
    ), sum(counts)


def attention_cases(backend: CpuBackend, name: str, slices: Slices) -> list[KernelCase]:
    generator = torch.Generator().manual_seed(0)
    batch, num_blocks = make_batch(slices, generator)
    num_tokens = batch.positions_T.shape[0]
    visible = sum(length * start + length * (length + 1) // 2 for start, length in slices)
    held = sum(start + length for start, length in slices)
    width = SHAPE.num_heads + 2 * SHAPE.num_kv_heads
    qkv_TX = torch.randn(num_tokens, width * SHAPE.head_dim, generator=generator).bfloat16()
    cos_sin_PD = torch.randn(batch.max_kv_length, SHAPE.head_dim, generator=generator)
    cases = []
    for dtype, label in ((torch.bfloat16, "bf16"), (torch.int8, "int8 KV")):
        block_bytes = backend.kv_block_bytes(BLOCK_SIZE, SHAPE, dtype)
        num_layers = min(MAX_LAYERS, max(2, -(-CACHE_BYTES // (num_blocks * block_bytes))))
        layers = backend.allocate_kv(num_layers, num_blocks, BLOCK_SIZE, SHAPE, dtype, CPU)
        fill(backend, layers, num_blocks, generator)
        q_TND = backend.rope_and_cache(qkv_TX, cos_sin_PD, batch, layers[0], SHAPE)

        def attend(layer: KVLayer, q_TND: torch.Tensor = q_TND) -> Callable[[], object]:
            return lambda: backend.attention(q_TND, batch, layer, SHAPE)

        def rope(layer: KVLayer) -> Callable[[], object]:
            return lambda: backend.rope_and_cache(qkv_TX, cos_sin_PD, batch, layer, SHAPE)

        read = held * block_bytes / BLOCK_SIZE + 2 * q_TND.nbytes
        flops = 4.0 * visible * SHAPE.num_heads * SHAPE.head_dim
        cases.append(
            kernel_case(f"attention {name}, {label}", read, flops, [attend(x) for x in layers])
        )
        moved = 2.0 * qkv_TX.nbytes
        cases.append(
            kernel_case(f"rope + cache {name}, {label}", moved, 0.0, [rope(x) for x in layers])
        )
    return cases


def fill(
    backend: CpuBackend, layers: Sequence[KVLayer], num_blocks: int, generator: torch.Generator
) -> None:
    """Random keys and values in every block, written as a step would write them."""
    slot_mapping_T = torch.arange(num_blocks * BLOCK_SIZE, dtype=torch.int32)
    count = slot_mapping_T.shape[0]
    batch = Batch(
        positions_T=torch.zeros(count, dtype=torch.int32),
        query_starts_S1=torch.tensor([0, count], dtype=torch.int32),
        starts_S=torch.zeros(1, dtype=torch.int32),
        lengths_S=torch.tensor([count], dtype=torch.int32),
        block_tables_SB=torch.zeros((1, num_blocks), dtype=torch.int32),
        slot_mapping_T=slot_mapping_T,
        num_decodes=0,
        max_length=count,
        max_kv_length=1,
    )
    width = (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim
    qkv_TX = torch.randn(count, width, generator=generator).bfloat16()
    table_PD = torch.ones(1, SHAPE.head_dim)
    for layer in layers:
        backend.rope_and_cache(qkv_TX, table_PD, batch, layer, SHAPE)


def surrounding_cases(backend: CpuBackend, num_tokens: int) -> list[KernelCase]:
    x_TH = torch.randn(num_tokens, HIDDEN).bfloat16()
    residual_TH, weight_H = torch.zeros_like(x_TH), torch.ones(HIDDEN).bfloat16()
    gate_up_T2I = torch.randn(num_tokens, 2 * INNER).bfloat16()
    return [
        kernel_case(f"add + norm, {num_tokens} tokens", 4.0 * x_TH.nbytes, 0.0,
             [lambda: backend.add_rms_norm(x_TH, residual_TH, weight_H, 1e-5)] * 8),
        kernel_case(f"silu * up, {num_tokens} tokens", 1.5 * gate_up_T2I.nbytes, 0.0,
             [lambda: backend.activate(gate_up_T2I, "silu", gated=True)] * 8),
    ]  # fmt: skip


def sampling_cases(num_rows: int) -> list[KernelCase]:
    logits_SV = torch.randn(num_rows, VOCABULARY)

    def case(name: str, temperature: float, top_k: int, top_p: float) -> KernelCase:
        rows = SamplingRows(
            temperature_S=np.full(num_rows, temperature, np.float32),
            top_k_S=np.full(num_rows, top_k, np.int32),
            top_p_S=np.full(num_rows, top_p, np.float32),
            min_p_S=np.zeros(num_rows, np.float32),
            seed_S=np.arange(num_rows, dtype=np.int64),
            position_S=np.arange(num_rows, dtype=np.int64),
        )
        run: list[Callable[[], object]] = [lambda: sampling.sample(logits_SV, rows)] * 4
        return kernel_case(f"sample {num_rows} rows, {name}", logits_SV.nbytes, 0.0, run)

    return [
        case("argmax", 0.0, 0, 1.0),
        case("temperature 0.8", 0.8, 0, 1.0),
        case("temperature 0.8, top_p 0.95", 0.8, 0, 0.95),
        case("temperature 0.8, top_k 50", 0.8, 50, 1.0),
    ]


def command(
    context: typer.Context,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all cases.")] = 3,
    only: Annotated[str, typer.Option(help="Only cases whose name contains this.")] = "",
    threads: Annotated[int, typer.Option(min=0, help="0: all cores.")] = 0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Time attention, rope, norms, activation and sampling of the 135M shape."""
    if threads:
        library.set_num_threads(threads)
    backend = CpuBackend()
    with console.status("filling caches"):
        cases = [
            case
            for name, slices in STEPS.items()
            for case in attention_cases(backend, name, slices)
        ]
        cases += [case for count in (1, 32, 512) for case in surrounding_cases(backend, count)]
        cases += [case for num_rows in (1, 32) for case in sampling_cases(num_rows)]
    cases = [case for case in cases if only in case.labels["case"]]
    if not cases:
        raise typer.BadParameter(f"no case's name contains {only!r}", param_hint="--only")
    ceilings = measure_cases(cases, rounds)
    results = [figures_of(case, ceilings) for case in cases]
    found = {
        "isa": library.isa().name.lower(),
        "threads": library.num_threads(),
        "ceilings": asdict(ceilings),
        "results": [r.to_dict() for r in results],
    }
    publish(make_report(context, found), as_json, out)
    if not as_json:
        title = f"{ceilings}, {found['isa']}, {found['threads']} threads"
        rows = [(r.labels["case"], *r.cells()) for r in results]
        output.print(table(title, ("case", *COLUMNS), rows))
