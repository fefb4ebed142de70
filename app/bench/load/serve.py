"""`legato bench serve`: an open-loop load on any OpenAI URL."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from rich.progress import Progress

from app.bench.load.client import LoadClient, first_model
from app.bench.load.figures import LoadFigures, exit_if_any_failed, figures_table, load_figures
from app.bench.load.workload import LengthsOption, Load
from app.bench.report import make_report, publish
from app.bench.terminal import Json, Out, console, output

Url = Annotated[str, typer.Option(help="Root of any OpenAI-compatible server.")]
Model = Annotated[str | None, typer.Option(help="Model name; the server's first if absent.")]
Qps = Annotated[float, typer.Option(min=0.01, help="Poisson arrivals per second.")]
Seconds = Annotated[float, typer.Option(min=1.0, help="Length of the arrivals.")]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar="LEGATO_API_KEY", help="API key, where the server asks for one."),
]
DEFAULT_URL = "http://127.0.0.1:8000"


def run_load(client: LoadClient, load: Load, *, tbt_ms: float | None = None) -> LoadFigures:
    """Run one load from its first arrival to its last answer.

    tbt_ms: the objective of goodput and stalls.
    """
    jobs = load.jobs()
    quiet = not console.is_terminal
    with Progress(console=console, transient=True, disable=quiet) as progress:
        task = progress.add_task(f"{load.qps:.2f} requests/s", total=len(jobs))
        traces = asyncio.run(client.run(jobs, lambda _: progress.advance(task)))
    return load_figures(traces, tbt_ms=tbt_ms)


def command(
    context: typer.Context,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    model: Model = None,
    qps: Qps = 2.0,
    seconds: Seconds = 40.0,
    lengths: LengthsOption = "sharegpt/8",
    tbt_ms: Annotated[float | None, typer.Option(min=1.0, help="Objective to judge by.")] = None,
    seed: int = 0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Open-loop Poisson load: TTFT, TBT, stalls, goodput."""
    load = Load(lengths, qps, seconds, seed=seed)
    model = model or first_model(url, api_key)
    figures = run_load(LoadClient(url, model, api_key=api_key), load, tbt_ms=tbt_ms)
    figures.check_measured()
    publish(make_report(context, figures.to_dict(), {"model": model}), as_json, out)
    if not as_json:
        output.print(figures_table([figures]))
    exit_if_any_failed([figures])
