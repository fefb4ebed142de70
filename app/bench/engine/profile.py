"""`legato profile`: measure step times on this machine and fit the cost model the engine plans by.

Writes three files: the measurements (Parquet), the fitted model (JSON, what
`scheduling.cost_model` reads) and the report with its error on held-out steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from actors.scheduling.cost.model import CostModel
from app.bench.engine.stage import LoadedStage
from app.bench.engine.steps import DEFAULT_SHAPE
from app.bench.machine import describe
from app.simulate.hardware.profile import EngineLimits, profile, write_measurements

_err = Console(stderr=True, highlight=False)


def command(
    model: Annotated[Path, typer.Argument(help="Hugging Face folder, or one with config.json.")] = (
        DEFAULT_SHAPE
    ),
    out: Annotated[Path, typer.Option(help="Folder for the three files.")] = Path("out/profile"),
    load_format: Annotated[str, typer.Option(help="auto or dummy.")] = "dummy",
    quantization: Annotated[str, typer.Option(help="none, int8 or int4.")] = "none",
    backend: Annotated[str, typer.Option()] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="0: all cores.")] = 0,
    max_requests: Annotated[int, typer.Option(min=1)] = 64,
    max_step_tokens: Annotated[int, typer.Option(min=16)] = 1024,
    mixes: Annotated[int, typer.Option(min=20, help="Random hybrid steps.")] = 120,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure step times over tokens, context, decodes and chunks; fit the cost model."""
    stage = LoadedStage(
        model,
        load_format=load_format,
        quantization=quantization,
        backend=backend,
        threads=threads,
        max_requests=max_requests,
        max_step_tokens=max_step_tokens,
    )
    name = f"{model.resolve().name}-{stage.info.backend}" + (
        "" if quantization == "none" else f"-{quantization}"
    )
    limits = EngineLimits(
        max_step_tokens=max_step_tokens,
        max_requests=max_requests,
        max_model_len=stage.info.max_model_len,
        kv_tokens=stage.kv_tokens,
    )
    base = CostModel(
        name,
        tokens_s=((1, 1.0),),
        kv_tokens=stage.kv_tokens,
        max_model_len=stage.info.max_model_len,
        source=f"legato profile, {describe()['date']}",
    )
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=_err, transient=True) as progress:
        task = progress.add_task("measuring steps", total=None)
        fitted, report, measurements = profile(
            stage.time_once,
            limits,
            base,
            repeats=repeats,
            num_mixed=mixes,
            on_progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    out.mkdir(parents=True, exist_ok=True)
    write_measurements(measurements, out / f"{name}.parquet")
    (out / f"{name}.json").write_text(json.dumps(fitted.to_dict(), indent=2) + "\n")
    summary = {"machine": describe(), "model": name, "error": report.to_dict()}
    (out / f"{name}-report.json").write_text(json.dumps(summary, indent=2) + "\n")
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
    _err.print(
        f"{name}: {report.num_fitted} steps fitted, {report.num_held_out} held out; error median "
        f"{100 * report.median_error:.1f} %, P95 {100 * report.p95_error:.1f} %\n"
        f"use it with  scheduling.cost_model: {out / f'{name}.json'}"
    )


def register(app: typer.Typer) -> None:
    app.command("profile")(command)
