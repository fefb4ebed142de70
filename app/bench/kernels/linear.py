"""`legato bench kernels linear`: linear layers against the arithmetic limit of this machine.

A case reads its layer's packed weight, and every sample one that other weights have since pushed
out of the caches. How samples become figures: `app.bench.kernels.timing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import torch
import typer

from app.bench.ceilings import Ceilings
from app.bench.kernels.timing import (
    CACHE_BYTES,
    COLUMNS,
    QUANTILE,
    KernelCase,
    KernelFigures,
    figures_of,
    measure_cases,
    step_figures,
    timed,
)
from app.bench.report import make_report, publish
from app.bench.terminal import Json, Out, console, numbers, output, table
from kernels.cpu import library
from kernels.cpu.linear import CpuLinear, pack_linear, time_linears

_MAX_COPIES = 400
_ONEDNN = "onednn bf16"


@dataclass(frozen=True, slots=True)
class LinearShape:
    name: str
    out_features: int
    in_features: int
    per_model: int  # how many layers of this shape a decode step runs


MODELS = {
    "135m": (
        LinearShape("qkv", 960, 576, 30),
        LinearShape("out", 576, 576, 30),
        LinearShape("gate_up", 3072, 576, 30),
        LinearShape("down", 576, 1536, 30),
        LinearShape("lm_head", 49152, 576, 1),
    ),
    "1b": (
        LinearShape("qkv", 3072, 2048, 16),
        LinearShape("out", 2048, 2048, 16),
        LinearShape("gate_up", 16384, 2048, 16),
        LinearShape("down", 2048, 8192, 16),
        LinearShape("lm_head", 128256, 2048, 1),
    ),
}


def random_weight(shape: LinearShape) -> torch.Tensor:
    """(O, K)"""
    return (torch.randn(shape.out_features, shape.in_features) * 0.02).bfloat16()


def num_copies(num_bytes: int) -> int:
    """Number of weights of one shape that a pass over them evicts from the cache."""
    return min(_MAX_COPIES, max(2, -(-CACHE_BYTES // num_bytes)))


def linear_case(
    shape: LinearShape, weights: str, num_rows: int, num_bytes: int, sample: Any
) -> KernelCase:
    return KernelCase(
        {"layer": shape.name, "weights": weights, "num_rows": num_rows},
        num_bytes,
        2.0 * num_rows * shape.out_features * shape.in_features,
        sample,
        shape.per_model,
    )


def own_cases(shape: LinearShape, weights: str, rows: Sequence[int]) -> list[KernelCase]:
    """The engine's kernel; weights: "bf16", "int8", "int4" or "int4-g64" and the like."""
    weight_OK = random_weight(shape)
    quantization = "none" if weights == "bf16" else weights
    linears: list[CpuLinear] = [pack_linear(weight_OK, None, quantization)]
    num_bytes = linears[0].num_bytes
    linears += [pack_linear(weight_OK, None, quantization) for _ in range(1, num_copies(num_bytes))]

    def case(num_rows: int) -> KernelCase:
        x_TK = torch.randn(num_rows, shape.in_features).bfloat16()
        sample = partial(time_linears, linears, x_TK)
        return linear_case(shape, weights, num_rows, num_bytes, sample)

    return [case(num_rows) for num_rows in rows]


def onednn_cases(shape: LinearShape, rows: Sequence[int]) -> list[KernelCase]:
    """torch's packed oneDNN product of the same weight, packed for each number of rows.

    Empty where torch has none for bf16 on this processor (it asks for AVX-512 or more).
    """
    weight_OK = random_weight(shape)
    try:
        torch.ops.mkldnn._reorder_linear_weight(weight_OK, 1)
    except RuntimeError:
        return []
    num_bytes = weight_OK.nbytes

    def case(num_rows: int) -> KernelCase:
        x_TK = torch.randn(num_rows, shape.in_features).bfloat16()
        packed = [
            torch.ops.mkldnn._reorder_linear_weight(weight_OK, num_rows)
            for _ in range(num_copies(num_bytes))
        ]
        multiply = torch.ops.mkldnn._linear_pointwise
        calls = [partial(multiply, x_TK, weight, None, "none", [], "") for weight in packed]
        return linear_case(shape, _ONEDNN, num_rows, num_bytes, partial(timed, calls))

    return [case(num_rows) for num_rows in rows]


def whole_model(cases: Sequence[KernelCase], ceilings: Ceilings) -> list[KernelFigures]:
    """All linear layers of a step together, per format and number of rows."""
    groups: dict[tuple[str, int], list[KernelCase]] = {}
    for case in cases:
        groups.setdefault((case.labels["weights"], case.labels["num_rows"]), []).append(case)
    return [
        step_figures({"layer": "all", "weights": weights, "num_rows": rows}, group, ceilings)
        for (weights, rows), group in groups.items()
    ]


def command(
    context: typer.Context,
    model: Annotated[str, typer.Option(help=f"{' or '.join(MODELS)}.")] = "135m",
    weights: Annotated[str, typer.Option(help="Comma-separated formats.")] = "bf16,int8,int4",
    rows: Annotated[str, typer.Option(help="Comma-separated batch sizes.")] = "1,8,32,512",
    layers: Annotated[str, typer.Option(help="Comma-separated layers; all if empty.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all cases.")] = 5,
    onednn: Annotated[bool, typer.Option(help="Measure torch's packed oneDNN too.")] = True,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Time per linear layer, batch size and weight format, against the limit of this machine."""
    if model not in MODELS:
        raise typer.BadParameter(f"use one of {', '.join(MODELS)}", param_hint="--model")
    names = [shape.name for shape in MODELS[model]]
    wanted = layers.split(",") if layers else names
    if unknown := sorted(set(wanted) - set(names)):
        raise typer.BadParameter(f"{unknown[0]!r}: use {', '.join(names)}", param_hint="--layers")
    torch.set_num_threads(library.num_threads())
    batch_sizes = numbers(rows, "--rows", int)
    cases: list[KernelCase] = []
    with console.status("packing weights"):
        for shape in MODELS[model]:
            if shape.name in wanted:
                for kind in weights.split(","):
                    cases += own_cases(shape, kind, batch_sizes)
                if onednn:
                    cases += onednn_cases(shape, batch_sizes)
    ceilings = measure_cases(cases, rounds)
    results = [figures_of(case, ceilings) for case in cases]
    results += whole_model(cases, ceilings)
    found = {
        "isa": library.isa().name.lower(),
        "threads": library.num_threads(),
        "quantile": QUANTILE,
        "ceilings": asdict(ceilings),
        "results": [r.to_dict() for r in results],
    }
    publish(make_report(context, found), as_json, out)
    if not as_json:
        _print(f"{model} Llama, {ceilings}, {found['isa']}, {found['threads']} threads", results)


def _print(title: str, results: Sequence[KernelFigures]) -> None:
    onednn_us = {
        (r.labels["layer"], r.labels["num_rows"]): r.time_us
        for r in results
        if r.labels["weights"] == _ONEDNN
    }
    rows = []
    for r in results:
        layer, weights, num_rows = r.labels.values()
        if weights != _ONEDNN:
            other = onednn_us.get((layer, num_rows))
            rows.append(
                (layer, weights, str(num_rows), *r.cells(), "" if other is None else f"{other:.1f}")
            )
    output.print(
        table(title, ("layer", "weights", "rows", *COLUMNS, "oneDNN us"), rows, num_words=2)
    )
