"""`legato bench engine`: step times of one stage against what this machine's arithmetic allows.

The limit of a step is max(bytes / bandwidth, FLOPs / peak): weights and KV read once, every
multiply-add done at the rate the cores reach from registers. Both ceilings are measured in the
same run, between the cases, because shared machines drift. No Ray: the stage runs in this process.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from actors.scheduling.interfaces import StepShape
from app.bench.machine import describe
from app.bench.stage import LoadedStage
from kernels.cpu import library

DEFAULT_SHAPE = Path("configs/models/shapes/llama-135m")


@dataclass(frozen=True, slots=True)
class Case:
    """A hybrid step: `num_decodes` at `context` tokens beside one prefill chunk behind `prefix`."""

    name: str
    num_decodes: int = 0
    context: int = 256
    chunk: int = 0
    prefix: int = 0

    @property
    def shape(self) -> StepShape:
        prefills = ((self.prefix, self.chunk),) if self.chunk else ()
        return StepShape(self.num_decodes, self.num_decodes * self.context, prefills)


CASES = (
    Case("decode 1", 1),
    Case("decode 8", 8),
    Case("decode 32", 32),
    Case("decode 32, context 1536", 32, 1536),
    Case("prefill 512", chunk=512),
    Case("prefill 512 behind 1024", chunk=512, prefix=1024),
    Case("hybrid 480 + 32 decodes", 32, chunk=480),
    Case("hybrid 96 + 32 decodes", 32, chunk=96),
)


@dataclass(frozen=True, slots=True)
class Ceilings:
    bandwidth_gb_s: float
    peak_gflop_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    case: str
    step_ms: float
    limit_ms: float
    ratio: float
    bound: str  # "memory" or "compute"


def measure_ceilings(floats: torch.Tensor) -> Ceilings:
    """Best of a few: a ceiling is what the machine can do when nobody is in the way."""
    read_s, rate = [], []
    for _ in range(3):
        begin = time.perf_counter()
        library.stream_read(floats)
        read_s.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        flops = library.multiply_in_registers(20_000_000, 2 * library.num_threads())
        rate.append(flops / (time.perf_counter() - begin))
    return Ceilings(floats.numel() * 4 / min(read_s) / 1e9, max(rate) / 1e9)


def limit(stage: LoadedStage, case: Case, ceilings: Ceilings) -> tuple[float, str]:
    """(seconds, what binds): weights and KV read once, every multiply-add at the peak."""
    c = stage.config
    hidden, layers = c["hidden_size"], c["num_hidden_layers"]
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    head_dim = c.get("head_dim") or hidden // heads
    per_layer = (
        hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * (c["intermediate_size"])
    )
    head = hidden * c["vocab_size"]
    weight_bytes = {"none": 2.0, "int8": 1.0, "int4": 0.5}[stage.spec.quantization]
    tokens = case.num_decodes + case.chunk
    rows = case.num_decodes + (1 if case.chunk else 0)
    kv_tokens = case.num_decodes * case.context + case.prefix + case.chunk
    pairs = case.num_decodes * case.context + case.chunk * (case.prefix + case.chunk / 2)
    num_bytes = weight_bytes * (layers * per_layer + head)
    num_bytes += kv_tokens * layers * 2 * kv_heads * head_dim * 2
    flops = 2.0 * tokens * layers * per_layer + 2.0 * rows * head
    flops += 4.0 * pairs * layers * heads * head_dim
    memory_s = num_bytes / (ceilings.bandwidth_gb_s * 1e9)
    compute_s = flops / (ceilings.peak_gflop_s * 1e9)
    return max(memory_s, compute_s), "memory" if memory_s > compute_s else "compute"


def run(stage: LoadedStage, cases: Sequence[Case], repeats: int) -> tuple[Ceilings, list[Measured]]:
    """Rounds over all cases, ceilings measured in every round; medians of the rounds."""
    floats = torch.zeros(64 << 20)
    floats += 1.0  # touched: untouched pages are all the same zero page
    times: dict[str, list[float]] = {case.name: [] for case in cases}
    ceilings: list[Ceilings] = []
    for round_number in range(repeats):
        ceilings.append(measure_ceilings(floats))
        for case in cases:
            ids = stage.enter(case.shape)
            stage.step(case.shape, ids)
            steps = [stage.step(case.shape, ids) for _ in range(5 if case.chunk else 15)]
            stage.leave(ids)
            if round_number or repeats == 1:  # the first round warms caches and pages
                times[case.name].append(statistics.median(steps))
    ceiling = Ceilings(
        max(c.bandwidth_gb_s for c in ceilings), max(c.peak_gflop_s for c in ceilings)
    )
    results = []
    for case in cases:
        step_s = statistics.median(times[case.name])
        limit_s, bound = limit(stage, case, ceiling)
        results.append(Measured(case.name, 1e3 * step_s, 1e3 * limit_s, step_s / limit_s, bound))
    return ceiling, results


def bench_engine(
    model: Annotated[Path, typer.Option(help="A folder with config.json.")] = DEFAULT_SHAPE,
    quantization: Annotated[str, typer.Option(help="none, int8 or int4.")] = "none",
    backend: Annotated[str, typer.Option(help="cpu or torch.")] = "cpu",
    threads: Annotated[int, typer.Option(min=0, help="0: all cores.")] = 0,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON report here too.")] = None,
) -> None:
    """Step time over batch, context and chunk, against the arithmetic limit of this machine."""
    stage = LoadedStage(
        model, quantization=quantization, backend=backend, threads=threads or library.num_threads()
    )
    ceilings, results = run(stage, CASES, repeats)
    report = {
        "machine": describe(),
        "model": model.name,
        "quantization": quantization,
        "backend": stage.info.backend,
        "ceilings": asdict(ceilings),
        "results": [asdict(r) for r in results],
    }
    text = json.dumps(report, indent=2)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")
    if as_json:
        typer.echo(text)
        return
    table = Table(
        title=f"{model.name}, {quantization}, {ceilings.bandwidth_gb_s:.0f} GB/s, "
        f"{ceilings.peak_gflop_s:.0f} GFLOP/s",
        title_justify="left",
    )
    for column in ("step", "ms", "limit ms", "ratio", "bound"):
        table.add_column(column, justify="left" if column in ("step", "bound") else "right")
    for r in results:
        table.add_row(r.case, f"{r.step_ms:.2f}", f"{r.limit_ms:.2f}", f"{r.ratio:.2f}", r.bound)
    Console().print(table)


def register(bench: typer.Typer) -> None:
    bench.command("engine")(bench_engine)
