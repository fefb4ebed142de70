"""`legato bench engine`: step times of one stage against what this machine's arithmetic allows.

The limit of a step is max(bytes / bandwidth, FLOPs / peak): weights and KV read once, every
multiply-add done at the rate the cores reach from registers. Both ceilings are measured in the
same run, between the cases, because shared machines drift. No Ray: the stage runs in this process.
"""

from __future__ import annotations

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

from actors.scheduling.plan import StepShape
from app.bench.engine.stage import LoadedStage
from app.bench.load.generator import publish
from app.bench.machine import describe
from kernels.cpu import library

_WEIGHT_BYTES = {"none": 2.0, "int8": 1.0, "int4": 0.5}
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
    quantization: str
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
    weight_bytes = _WEIGHT_BYTES[stage.spec.quantization]
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


def run(
    stages: Sequence[LoadedStage], cases: Sequence[Case], repeats: int
) -> tuple[Ceilings, list[Measured]]:
    """Rounds over all stages and cases, ceilings measured in every round; medians of the rounds."""
    floats = torch.zeros(64 << 20)
    floats += 1.0  # touched: untouched pages are all the same zero page
    times: dict[tuple[str, str], list[float]] = {
        (stage.spec.quantization, case.name): [] for stage in stages for case in cases
    }
    ceilings: list[Ceilings] = []
    for round_number in range(repeats):
        ceilings.append(measure_ceilings(floats))
        for case in cases:
            for stage in stages:
                seconds = _time(stage, case)
                if round_number or repeats == 1:  # the first round warms caches and pages
                    times[stage.spec.quantization, case.name].append(seconds)
    ceiling = Ceilings(
        max(c.bandwidth_gb_s for c in ceilings), max(c.peak_gflop_s for c in ceilings)
    )
    results = []
    for stage in stages:
        for case in cases:
            kind = stage.spec.quantization
            step_s = statistics.median(times[kind, case.name])
            limit_s, bound = limit(stage, case, ceiling)
            results.append(
                Measured(kind, case.name, 1e3 * step_s, 1e3 * limit_s, step_s / limit_s, bound)
            )
    return ceiling, results


def _time(stage: LoadedStage, case: Case) -> float:
    """Median seconds of a few equal steps."""
    ids = stage.enter(case.shape)
    stage.step(case.shape, ids)
    steps = [stage.step(case.shape, ids) for _ in range(5 if case.chunk else 15)]
    stage.leave(ids)
    return statistics.median(steps)


def bench_engine(
    model: Annotated[Path, typer.Option(help="A folder with config.json.")] = DEFAULT_SHAPE,
    quantization: Annotated[
        str, typer.Option(help="none, int8, int4, or several: none,int8,int4.")
    ] = "none",
    backend: Annotated[str, typer.Option(help="cpu or torch.")] = "cpu",
    threads: Annotated[int, typer.Option(min=0, help="0: all cores.")] = 0,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON report here too.")] = None,
) -> None:
    """Step time over batch, context and chunk, against the arithmetic limit of this machine."""
    kinds = quantization.split(",")
    if unknown := sorted(set(kinds) - set(_WEIGHT_BYTES)):
        raise typer.BadParameter(f"unknown {unknown[0]!r}", param_hint="--quantization")
    stages = [
        LoadedStage(
            model, quantization=kind, backend=backend, threads=threads or library.num_threads()
        )
        for kind in kinds
    ]
    ceilings, results = run(stages, CASES, repeats)
    publish(
        {
            "machine": describe(),
            "model": model.name,
            "backend": stages[0].info.backend,
            "ceilings": asdict(ceilings),
            "results": [asdict(r) for r in results],
        },
        as_json,
        out,
    )
    if not as_json:
        _print(model.name, ceilings, results)


def _print(model: str, ceilings: Ceilings, results: Sequence[Measured]) -> None:
    table = Table(
        title=f"{model}, {ceilings.bandwidth_gb_s:.0f} GB/s, {ceilings.peak_gflop_s:.0f} GFLOP/s",
        title_justify="left",
    )
    for column in ("weights", "step", "ms", "limit ms", "ratio", "bound", "speed-up"):
        words = column in ("weights", "step", "bound")
        table.add_column(column, justify="left" if words else "right")
    first = {r.case: r.step_ms for r in results if r.quantization == results[0].quantization}
    for r in results:
        weights = "bf16" if r.quantization == "none" else r.quantization
        times = (f"{r.step_ms:.2f}", f"{r.limit_ms:.2f}", f"{r.ratio:.2f}")
        table.add_row(weights, r.case, *times, r.bound, f"{first[r.case] / r.step_ms:.2f}")
    Console().print(table)


def register(bench: typer.Typer) -> None:
    bench.command("engine")(bench_engine)
