"""`python -m app.bench.kernels.attention`: attention and what surrounds it against this machine.

The limit of an operation is max(bytes / bandwidth, FLOPs / peak): K, V and activations read once,
every multiply-add of visible positions done at the rate the cores reach from registers. Both
ceilings and all cases take turns in short rounds, and each figure is a low quantile of its
samples, so that a core lent to another process spoils samples and not the comparison. Attention
goes from layer to layer, over more cache than the processor holds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from app.bench.kernels.linear import (
    CACHE_BYTES,
    PEAK_COUNT,
    PEAK_TASKS,
    READ_FLOATS,
    Ceilings,
    quantile,
)
from app.bench.machine import describe
from kernels.cpu import library, sampling
from kernels.cpu.backend import CpuBackend
from kernels.interface import AttentionShape, Batch, KVLayer
from kernels.torch_sampling import SamplingRows

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


@dataclass(slots=True)
class Case:
    """One operation, with the bytes and FLOPs of one call, and its samples."""

    name: str
    num_bytes: float
    flops: float
    run: list[Callable[[], object]]  # the same work on different memory
    samples_s: list[float] = field(default_factory=list)

    def sample(self) -> None:
        for call in self.run:
            begin = time.perf_counter()
            call()
            self.samples_s.append(time.perf_counter() - begin)


@dataclass(frozen=True, slots=True)
class Result:
    """What a call took and reached; `ratio` is time over limit."""

    case: str
    time_us: float
    gb_s: float
    gflop_s: float
    ratio: float


def make_batch(slices: Slices, generator: torch.Generator) -> tuple[Batch, int]:
    """A batch over shuffled blocks, and how many blocks that takes."""
    counts = [-(-(start + length) // BLOCK_SIZE) for start, length in slices]
    order = torch.randperm(sum(counts), generator=generator).to(torch.int32)
    tables_SB = torch.zeros((len(slices), max(counts)), dtype=torch.int32)
    positions, slots, used = [], [], 0
    for row, ((start, length), count) in enumerate(zip(slices, counts, strict=True)):
        tables_SB[row, :count] = order[used : used + count]
        used += count
        where = torch.arange(start, start + length)
        positions.append(where)
        slots.append(tables_SB[row, where // BLOCK_SIZE] * BLOCK_SIZE + where % BLOCK_SIZE)
    starts_S = torch.tensor([start for start, _ in slices], dtype=torch.int32)
    lengths_S = torch.tensor([length for _, length in slices], dtype=torch.int32)
    return Batch(
        positions_T=torch.cat(positions).to(torch.int32),
        query_starts_S1=torch.cat((torch.zeros(1), lengths_S.cumsum(0))).to(torch.int32),
        starts_S=starts_S,
        lengths_S=lengths_S,
        block_tables_SB=tables_SB,
        slot_mapping_T=torch.cat(slots).to(torch.int32),
        num_decodes=sum(length == 1 for _, length in slices),
        max_length=int(lengths_S.max()),
        max_kv_length=int((starts_S + lengths_S).max()),
    ), sum(counts)


def attention_cases(backend: CpuBackend, name: str, slices: Slices) -> list[Case]:
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
        cases.append(Case(f"attention {name}, {label}", read, flops, [attend(x) for x in layers]))
        moved = 2.0 * qkv_TX.nbytes
        cases.append(Case(f"rope + cache {name}, {label}", moved, 0.0, [rope(x) for x in layers]))
    return cases


def fill(
    backend: CpuBackend, layers: Sequence[KVLayer], num_blocks: int, generator: torch.Generator
) -> None:
    """Random keys and values in every block, written as a step would write them."""
    slots_T = torch.arange(num_blocks * BLOCK_SIZE, dtype=torch.int32)
    count = slots_T.shape[0]
    batch = Batch(
        positions_T=torch.zeros(count, dtype=torch.int32),
        query_starts_S1=torch.tensor([0, count], dtype=torch.int32),
        starts_S=torch.zeros(1, dtype=torch.int32),
        lengths_S=torch.tensor([count], dtype=torch.int32),
        block_tables_SB=torch.zeros((1, num_blocks), dtype=torch.int32),
        slot_mapping_T=slots_T,
        num_decodes=0,
        max_length=count,
        max_kv_length=1,
    )
    width = (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim
    qkv_TX = torch.randn(count, width, generator=generator).bfloat16()
    table_PD = torch.ones(1, SHAPE.head_dim)
    for layer in layers:
        backend.rope_and_cache(qkv_TX, table_PD, batch, layer, SHAPE)


def surrounding_cases(backend: CpuBackend, num_tokens: int) -> list[Case]:
    x_TH = torch.randn(num_tokens, HIDDEN).bfloat16()
    residual_TH, weight_H = torch.zeros_like(x_TH), torch.ones(HIDDEN).bfloat16()
    gate_up_T2I = torch.randn(num_tokens, 2 * INNER).bfloat16()
    return [
        Case(f"add + norm, {num_tokens} tokens", 4.0 * x_TH.nbytes, 0.0,
             [lambda: backend.add_rms_norm(x_TH, residual_TH, weight_H, 1e-5)] * 8),
        Case(f"silu * up, {num_tokens} tokens", 1.5 * gate_up_T2I.nbytes, 0.0,
             [lambda: backend.silu_mul(gate_up_T2I)] * 8),
    ]  # fmt: skip


def sampling_cases(num_rows: int) -> list[Case]:
    logits_SV = torch.randn(num_rows, VOCABULARY)

    def case(name: str, temperature: float, top_k: int, top_p: float) -> Case:
        rows = SamplingRows(
            temperature_S=np.full(num_rows, temperature, np.float32),
            top_k_S=np.full(num_rows, top_k, np.int32),
            top_p_S=np.full(num_rows, top_p, np.float32),
            min_p_S=np.zeros(num_rows, np.float32),
            seed_S=np.arange(num_rows, dtype=np.int64),
            position_S=np.arange(num_rows, dtype=np.int64),
        )
        run: list[Callable[[], object]] = [lambda: sampling.sample(logits_SV, rows)] * 4
        return Case(f"sample {num_rows} rows, {name}", logits_SV.nbytes, 0.0, run)

    return [
        case("argmax", 0.0, 0, 1.0),
        case("temperature 0.8, top_p 0.95", 0.8, 0, 0.95),
        case("temperature 0.8, top_k 50", 0.8, 50, 1.0),
    ]


def measure(cases: list[Case], rounds: int) -> Ceilings:
    """Fills the cases' samples; returns the ceilings measured between them."""
    floats = torch.ones(CACHE_BYTES // 4)
    parts = [floats[i : i + READ_FLOATS] for i in range(0, floats.numel(), READ_FLOATS)]
    read_s: list[float] = []
    multiply_s: list[float] = []
    flops = 0
    for _ in range(rounds):
        for part in parts:
            begin = time.perf_counter()
            library.stream_read(part)
            read_s.append(time.perf_counter() - begin)
        for _ in range(5):
            begin = time.perf_counter()
            flops = library.multiply_in_registers(PEAK_COUNT, PEAK_TASKS)
            multiply_s.append(time.perf_counter() - begin)
        for case in cases:
            case.sample()
    return Ceilings(READ_FLOATS * 4 / quantile(read_s) / 1e9, flops / quantile(multiply_s) / 1e9)


def result(case: Case, ceilings: Ceilings) -> Result:
    time_s = quantile(case.samples_s)
    limit_s = ceilings.limit_s(case.num_bytes, case.flops)
    return Result(case.name, time_s * 1e6, case.num_bytes / time_s / 1e9,
                  case.flops / time_s / 1e9, time_s / limit_s)  # fmt: skip


def main(
    rounds: Annotated[int, typer.Option(help="Rounds over all cases.")] = 3,
    only: Annotated[str, typer.Option(help="Only cases whose name contains this.")] = "",
    threads: Annotated[int, typer.Option(help="Compute threads; 0 for all cores.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Write the results as JSON.")] = None,
) -> None:
    """Time attention, rope, norms, activation and sampling of the 135M shape."""
    if threads:
        library.set_num_threads(threads)
    backend = CpuBackend()
    cases = [c for name, slices in STEPS.items() for c in attention_cases(backend, name, slices)]
    cases += [c for num_tokens in (1, 32, 512) for c in surrounding_cases(backend, num_tokens)]
    cases += [c for num_rows in (1, 32) for c in sampling_cases(num_rows)]
    cases = [case for case in cases if only in case.name]
    ceilings = measure(cases, rounds)
    results = [result(case, ceilings) for case in cases]
    table = Table(
        title=f"{ceilings.bandwidth_gb_s:.1f} GB/s, {ceilings.peak_gflop_s:.0f} GFLOP/s, "
        f"{library.isa().name.lower()}, {library.num_threads()} threads"
    )
    for column in ("case", "us", "GB/s", "GFLOP/s", "time / limit"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for r in results:
        table.add_row(r.case, f"{r.time_us:.1f}", f"{r.gb_s:.1f}", f"{r.gflop_s:.0f}",
                      f"{r.ratio:.2f}")  # fmt: skip
    Console().print(table)
    if output is not None:
        report = {
            "machine": describe(),
            "ceilings": asdict(ceilings),
            "results": [asdict(r) for r in results],
        }
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
