"""`python -m app.bench.kernels.linear`: linear layers against the arithmetic limit of this machine.

The limit of a layer is max(bytes / bandwidth, FLOPs / peak): its packed weight read once, every
multiply-add done at the rate the cores reach from registers. Both ceilings and all layers take
turns in short rounds, and each figure is a low quantile of its samples, so that a core lent to
another process for some milliseconds spoils samples and not the comparison. Every sample reads a
weight that other weights have since pushed out of the caches.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from app.bench.machine import describe
from kernels.cpu import library
from kernels.cpu.linear import CpuLinear, pack_linear, time_linears

QUANTILE = 0.1
CACHE_BYTES = 96 << 20  # weights of one shape hold at least this much together
READ_FLOATS = 1 << 20  # of one sample of the bandwidth
PEAK_COUNT, PEAK_TASKS = 10_000, 32  # of one sample of the peak
MAX_COPIES = 400


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    out_features: int
    in_features: int
    per_model: int  # how many layers of this shape a decode step runs


MODELS = {
    "135m": (
        Shape("qkv", 960, 576, 30),
        Shape("out", 576, 576, 30),
        Shape("gate_up", 3072, 576, 30),
        Shape("down", 576, 1536, 30),
        Shape("lm_head", 49152, 576, 1),
    ),
    "1b": (
        Shape("qkv", 3072, 2048, 16),
        Shape("out", 2048, 2048, 16),
        Shape("gate_up", 16384, 2048, 16),
        Shape("down", 2048, 8192, 16),
        Shape("lm_head", 128256, 2048, 1),
    ),
}


@dataclass(slots=True)
class Case:
    """One shape, format and number of rows, with its samples in seconds."""

    shape: Shape
    weights: str  # "bf16", "int8", "int4-g64", ..., or "onednn bf16"
    num_rows: int
    num_bytes: int
    sample: Callable[[], list[float]]
    samples: list[float] = field(default_factory=list)

    @property
    def flops(self) -> float:
        return 2.0 * self.num_rows * self.shape.out_features * self.shape.in_features


@dataclass(frozen=True, slots=True)
class Ceilings:
    bandwidth_gb_s: float
    peak_gflop_s: float

    def limit_s(self, num_bytes: float, flops: float) -> float:
        return max(num_bytes / self.bandwidth_gb_s, flops / self.peak_gflop_s) / 1e9


@dataclass(frozen=True, slots=True)
class Result:
    """What a case took and what it reached; `ratio` is time over limit."""

    layer: str
    weights: str
    num_rows: int
    time_us: float
    gb_s: float
    gflop_s: float
    ratio: float


def quantile(samples: list[float]) -> float:
    return sorted(samples)[int(len(samples) * QUANTILE)]


def random_weight(shape: Shape) -> torch.Tensor:
    return (torch.randn(shape.out_features, shape.in_features) * 0.02).bfloat16()


def num_copies(num_bytes: int) -> int:
    """Enough weights of one shape that a pass over them leaves none in cache."""
    return min(MAX_COPIES, max(2, -(-CACHE_BYTES // num_bytes)))


def own_cases(shape: Shape, weights: str, rows: list[int]) -> list[Case]:
    weight_OK = random_weight(shape)
    quantization = "none" if weights == "bf16" else weights
    linears: list[CpuLinear] = [pack_linear(weight_OK, None, quantization)]
    num_bytes = linears[0].num_bytes
    linears += [pack_linear(weight_OK, None, quantization) for _ in range(1, num_copies(num_bytes))]

    def case(num_rows: int) -> Case:
        x_TK = torch.randn(num_rows, shape.in_features).bfloat16()
        return Case(shape, weights, num_rows, num_bytes, lambda: time_linears(linears, x_TK))

    return [case(num_rows) for num_rows in rows]


def onednn_cases(shape: Shape, rows: list[int]) -> list[Case]:
    """torch's packed oneDNN product of the same weight, packed for each number of rows."""
    weight_OK = random_weight(shape)
    num_bytes = weight_OK.nbytes

    def case(num_rows: int) -> Case:
        x_TK = torch.randn(num_rows, shape.in_features).bfloat16()
        packed = [
            torch.ops.mkldnn._reorder_linear_weight(weight_OK, num_rows)
            for _ in range(num_copies(num_bytes))
        ]

        def sample() -> list[float]:
            seconds = []
            for weight in packed:
                begin = time.perf_counter()
                torch.ops.mkldnn._linear_pointwise(x_TK, weight, None, "none", [], "")
                seconds.append(time.perf_counter() - begin)
            return seconds

        return Case(shape, "onednn bf16", num_rows, num_bytes, sample)

    return [case(num_rows) for num_rows in rows]


def measure(cases: list[Case], rounds: int) -> Ceilings:
    """Fills the cases' samples; returns the ceilings measured between them."""
    floats = torch.zeros(CACHE_BYTES // 4)
    floats += 1.0  # touched: untouched pages are all the same zero page
    parts = [floats[i : i + READ_FLOATS] for i in range(0, floats.numel(), READ_FLOATS)]
    read_s: list[float] = []
    multiply_s: list[float] = []
    flops = 0

    def sample_ceilings() -> None:
        nonlocal flops
        for part in parts:
            begin = time.perf_counter()
            library.stream_read(part)
            read_s.append(time.perf_counter() - begin)
        for _ in range(10):
            begin = time.perf_counter()
            flops = library.multiply_in_registers(PEAK_COUNT, PEAK_TASKS)
            multiply_s.append(time.perf_counter() - begin)

    with torch.inference_mode():
        for _ in range(rounds):
            sample_ceilings()
            for case in cases:
                case.samples += case.sample()
    return Ceilings(
        READ_FLOATS * 4 / quantile(read_s) / 1e9,
        flops / quantile(multiply_s) / 1e9,
    )


def result(case: Case, ceilings: Ceilings) -> Result:
    time_s = quantile(case.samples)
    return Result(
        layer=case.shape.name,
        weights=case.weights,
        num_rows=case.num_rows,
        time_us=time_s * 1e6,
        gb_s=case.num_bytes / time_s / 1e9,
        gflop_s=case.flops / time_s / 1e9,
        ratio=time_s / ceilings.limit_s(case.num_bytes, case.flops),
    )


def whole_model(cases: list[Case], ceilings: Ceilings) -> list[Result]:
    """All linear layers of a step together, per format and number of rows."""
    results = []
    for weights, num_rows in dict.fromkeys((case.weights, case.num_rows) for case in cases):
        chosen = [c for c in cases if (c.weights, c.num_rows) == (weights, num_rows)]
        time_s = sum(quantile(c.samples) * c.shape.per_model for c in chosen)
        num_bytes = sum(c.num_bytes * c.shape.per_model for c in chosen)
        flops = sum(c.flops * c.shape.per_model for c in chosen)
        limit_s = ceilings.limit_s(num_bytes, flops)
        results.append(
            Result("all", weights, num_rows, time_s * 1e6, num_bytes / time_s / 1e9,
                   flops / time_s / 1e9, time_s / limit_s)
        )  # fmt: skip
    return results


def print_table(model: str, ceilings: Ceilings, results: list[Result]) -> None:
    onednn = {(r.layer, r.num_rows): r.time_us for r in results if r.weights == "onednn bf16"}
    table = Table(
        title=f"Linear layers of a {model} Llama: {ceilings.bandwidth_gb_s:.0f} GB/s, "
        f"{ceilings.peak_gflop_s:.0f} GFLOP/s, {library.isa().name.lower()}, "
        f"{library.num_threads()} threads",
        title_justify="left",
    )
    table.add_column("layer")
    table.add_column("weights")
    for column in ("rows", "us", "GB/s", "GFLOP/s", "x limit", "oneDNN us"):
        table.add_column(column, justify="right")
    for r in results:
        if r.weights != "onednn bf16":
            other = onednn.get((r.layer, r.num_rows))
            table.add_row(
                *(r.layer, r.weights, str(r.num_rows), f"{r.time_us:.1f}", f"{r.gb_s:.1f}"),
                *(f"{r.gflop_s:.0f}", f"{r.ratio:.2f}", "" if other is None else f"{other:.1f}"),
            )
    Console().print(table)


def main(
    model: Annotated[str, typer.Option(help="135m or 1b.")] = "135m",
    weights: Annotated[str, typer.Option(help="Comma-separated formats.")] = "bf16,int8,int4",
    rows: Annotated[str, typer.Option(help="Comma-separated batch sizes.")] = "1,8,32,512",
    layers: Annotated[str, typer.Option(help="Comma-separated layers; all if empty.")] = "",
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    onednn: Annotated[bool, typer.Option(help="Measure torch's packed oneDNN too.")] = True,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON report here too.")] = None,
) -> None:
    """Time per linear layer, batch size and weight format, against the limit of this machine."""
    if model not in MODELS:
        raise typer.BadParameter(f"model must be one of {', '.join(MODELS)}")
    torch.set_num_threads(library.num_threads())
    batch_sizes = [int(text) for text in rows.split(",")]
    wanted = layers.split(",") if layers else [shape.name for shape in MODELS[model]]
    cases: list[Case] = []
    for shape in MODELS[model]:
        if shape.name in wanted:
            for kind in weights.split(","):
                cases += own_cases(shape, kind, batch_sizes)
            if onednn:
                cases += onednn_cases(shape, batch_sizes)
    ceilings = measure(cases, rounds)
    results = [result(case, ceilings) for case in cases] + whole_model(cases, ceilings)
    report = {
        "machine": describe(),
        "isa": library.isa().name.lower(),
        "threads": library.num_threads(),
        "model": model,
        "quantile": QUANTILE,
        "ceilings": asdict(ceilings),
        "results": [asdict(r) for r in results],
    }
    text = json.dumps(report, indent=2)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")
    if as_json:
        typer.echo(text)
    else:
        print_table(model, ceilings, results)


if __name__ == "__main__":
    typer.run(main)
