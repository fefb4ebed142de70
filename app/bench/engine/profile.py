"""`legato profile`: measure step times on this machine and fit the cost model the engine plans by.

Writes three files: the measurements (Parquet), the fitted model (JSON, what
`scheduling.cost_model` reads) and the report with its error on held-out steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from actors.calibration.fit import FitReport, Measurement
from actors.calibration.measure import EngineLimits
from actors.scheduling.cost.model import CostModel
from app.bench.report import make_report, publish, today
from app.bench.terminal import Json, Out, console
from app.paths import locate
from app.simulate.hardware.profile import profile, write_measurements

if TYPE_CHECKING:
    from app.bench.engine.stage import LoadedStage


def fit_cost_model(
    stage: LoadedStage,
    name: str,
    source: str,
    *,
    max_step_tokens: int,
    num_mixed: int,
    repeats: int,
    tile: int = 1,
) -> tuple[CostModel, FitReport, list[Measurement]]:
    """Measure steps on this stage and fit the model that budgets and the simulator read.

    source: what the model says of its origin. num_mixed: random hybrid steps beside the grid.
    """
    limits = EngineLimits(
        max_step_tokens=max_step_tokens,
        max_requests=stage.spec.max_requests,
        max_model_len=stage.info.max_model_len,
        kv_tokens=stage.kv_tokens,
    )
    base = CostModel(
        name,
        tokens_s=((1, 1.0),),
        attention_window=stage.info.attention_window,
        kv_tokens=stage.kv_tokens,
        max_model_len=stage.info.max_model_len,
        source=source,
    )
    quiet = not console.is_terminal
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task("measuring steps", total=None)
        return profile(
            stage.time_once,
            limits,
            base,
            tile=tile,
            repeats=repeats,
            num_mixed=num_mixed,
            on_progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def command(
    context: typer.Context,
    model: Annotated[
        Path,
        typer.Argument(callback=locate, help="Hugging Face folder, or one with config.json."),
    ] = Path("configs/models/shapes/llama-135m"),
    folder: Annotated[Path, typer.Option(file_okay=False, help="Where the three files go.")] = Path(
        "out/profile"
    ),
    load_format: Annotated[str, typer.Option(help="auto or dummy.")] = "dummy",
    quantization: Annotated[str, typer.Option(help="none, int8, int4, w8a8 or w4a8.")] = "none",
    backend: Annotated[str, typer.Option(help="cpu, torch, ...; auto: the machine's best.")] = (
        "auto"
    ),
    threads: Annotated[int, typer.Option(min=0, help="0: all cores.")] = 0,
    max_requests: Annotated[int, typer.Option(min=1, help="Largest batch measured.")] = 64,
    max_step_tokens: Annotated[int, typer.Option(min=16, help="Largest step measured.")] = 1024,
    mixes: Annotated[int, typer.Option(min=20, help="Random hybrid steps.")] = 120,
    repeats: Annotated[int, typer.Option(min=1, help="Times each step is measured.")] = 3,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Measure step times over tokens, context, decodes and chunks; fit the cost model."""
    from app.bench.engine.stage import LoadedStage  # torch: `legato --help` imports this module

    model = locate(model)
    if not (model / "config.json").exists():
        raise typer.BadParameter(f"no {model / 'config.json'}", param_hint="MODEL")
    with console.status("loading"):
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
    fitted, error, measurements = fit_cost_model(
        stage,
        name,
        f"legato profile, {today()}",
        max_step_tokens=max_step_tokens,
        num_mixed=mixes,
        repeats=repeats,
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_measurements(measurements, folder / f"{name}.parquet")
    (folder / f"{name}.json").write_text(json.dumps(fitted.to_dict(), indent=2) + "\n")
    report = make_report(
        context, {"name": name, "error": error.to_dict()}, {"backend": stage.info.backend}
    )
    publish(report, False, folder / f"{name}-report.json")
    publish(report, as_json, out)
    console.print(
        f"{name}: {error.num_fitted} steps fitted, {error.num_held_out} held out; error median "
        f"{100 * error.median_error:.1f} %, P95 {100 * error.p95_error:.1f} %\n"
        f"use it with  scheduling.cost_model: {folder / f'{name}.json'}"
    )
