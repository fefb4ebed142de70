"""`legato simulate`: one deployment, its capacity, the cheapest configuration, or the paper."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from actors.fleet.routers import ROUTERS
from actors.scheduling.config import ConfigError, SchedulerConfig
from actors.scheduling.cost.model import CostModel
from app.paths import locate
from app.simulate import tables
from app.simulate.hardware import cost_files
from app.simulate.hardware import deployments as hardware
from app.simulate.paper import evaluation, figure7
from app.simulate.paper.timeline import as_text
from app.simulate.run.campaign import run_jobs
from app.simulate.run.capacity import search_capacity
from app.simulate.run.config_search import candidates, search_configs
from app.simulate.run.record import write_requests
from app.simulate.run.simulation import Deployment, scheduler_config, simulate
from app.simulate.studies import routing as routing_study
from app.simulate.studies import scaling as scaling_study
from app.simulate.workload.lengths import Lengths
from app.simulate.workload.requests import Workload, generate
from app.simulate.workload.specs import load_workload, parse_arrivals, parse_lengths
from app.simulate.workload.traces import read_trace

# Name -> what yields its rows, and how they are shown.
STUDIES: dict[str, tuple[Callable[..., Iterator[Any]], Callable[[list[Any]], str]]] = {
    "routing": (routing_study.study, routing_study.as_markdown),
    "scaling": (scaling_study.study, scaling_study.as_markdown),
}


def register(app: typer.Typer) -> None:
    """Add `simulate` to the command line."""
    app.command(
        "simulate",
        help="Simulate a deployment: one run, its capacity, the cheapest configuration, the paper.",
    )(command)


def command(
    model: Annotated[
        str, typer.Argument(help="Cost model: a name in configs/hardware, or a JSON file.")
    ] = "yi-34b-a100-tp2",
    workload: Annotated[
        str,
        typer.Option(help="sharegpt4, arxiv, fixed:P,O, uniform:LOW,HIGH,RATIO, zipf; or a file."),
    ] = "sharegpt4",
    arrivals: Annotated[
        str, typer.Option(help="poisson, gamma[:cv], bursty, diurnal, fixed or trace.")
    ] = "poisson",
    qps: Annotated[float, typer.Option(help="Requests per second.", min=1e-6)] = 1.0,
    requests: Annotated[int, typer.Option(help="How many requests.", min=1)] = 512,
    policy: Annotated[str, typer.Option(help="Scheduling policy.")] = "sarathi",
    budget: Annotated[
        str, typer.Option(help="fixed, profiled, adaptive or throttled.")
    ] = "adaptive",
    token_budget: Annotated[
        int | None, typer.Option(help="Tokens of a fixed budget; 512 if absent.", min=1)
    ] = None,
    tbt_ms: Annotated[float, typer.Option(help="TBT objective.", min=0.001)] = 200.0,
    max_requests: Annotated[int, typer.Option(help="Sequences that run together.", min=1)] = 128,
    admission: Annotated[str, typer.Option(help="all, predicted_peak or predictive.")] = "all",
    order: Annotated[str, typer.Option(help="Order of the queue.")] = "auto",
    replicas: Annotated[
        int | None,
        typer.Option(help="Engines: 1, or a study's own number.", min=1),
    ] = None,
    routing: Annotated[
        str,
        typer.Option(help=f"{', '.join(ROUTERS)}; with --study: some of them, else all."),
    ] = "",
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0,
    find_capacity: Annotated[
        bool, typer.Option("--capacity", help="Search the highest load that meets the objective.")
    ] = False,
    find_config: Annotated[
        str,
        typer.Option("--search", help="MODEL/DEVICE: the cheapest TP, PP and budget for --qps."),
    ] = "",
    reproduce: Annotated[
        bool, typer.Option("--paper", help="Reproduce the paper's evaluation.")
    ] = False,
    figure_7: Annotated[
        bool, typer.Option("--figure7", help="The paper's figure 7 under every policy.")
    ] = False,
    fleet_study: Annotated[
        str, typer.Option("--study", help="routing or scaling: a fleet under each of them.")
    ] = "",
    quick: Annotated[bool, typer.Option(help="With --paper: a part of it, in a minute.")] = False,
    trace: Annotated[
        list[str] | None, typer.Option(help="With --paper: DATASET=FILE, lengths in its place.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes for searches.", min=1)] = 1,
    cache: Annotated[
        Path | None, typer.Option(help="With --paper: keep finished capacity searches here.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write Parquet, JSON and plots here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    console = Console(stderr=as_json)
    try:
        if figure_7:
            result = _figure7(console, out)
        elif reproduce:
            result = _paper(console, quick, trace or [], workers, cache, out)
        elif fleet_study:
            result = _study(console, fleet_study, replicas, routing, seed, workers, out)
        elif find_config:
            result = _search(console, find_config, workload, tbt_ms, qps, workers, requests)
        else:
            truth = load_cost_model(model)
            config = scheduler_config(
                truth,
                policy=policy,
                budget=budget,
                token_budget=token_budget,
                tbt_s=tbt_ms / 1e3,
                max_requests=max_requests,
                admission=admission,
                order=order,
            )
            engines, router = replicas or 1, routing or "slack"
            deployment = Deployment(config, truth, num_replicas=engines, routing=router)
            if find_capacity:
                result = _capacity(
                    console, deployment, parse_lengths(workload), tbt_ms / 1e3, qps, requests, seed
                )
            else:
                traffic = _traffic(workload, arrivals, qps, requests, seed)
                result = _run(console, deployment, traffic, seed, out)
    except OSError as error:
        raise typer.BadParameter(f"{error.filename}: {error.strerror}") from error
    except (ConfigError, ValueError, KeyError) as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        print(json.dumps(result, allow_nan=True))  # noqa: T201  the command's output


def load_cost_model(name: str) -> CostModel:
    """A JSON file, or a name in `configs/hardware`."""
    path = locate(name)
    return cost_files.load_cost_model(path) if path.suffix == ".json" else hardware.load_model(name)


def _traffic(workload: str, arrivals: str, qps: float, requests: int, seed: int) -> Workload:
    file = locate(workload)
    if file.suffix in (".csv", ".parquet"):
        return read_trace(str(file), None if arrivals == "trace" else qps, seed)
    if file.suffix in (".yaml", ".yml"):
        return load_workload(file, seed)
    return generate(
        parse_arrivals(arrivals, qps), parse_lengths(workload), requests, seed, workload
    )


def _run(
    console: Console, deployment: Deployment, traffic: Workload, seed: int, out: Path | None
) -> dict[str, Any]:
    result = simulate(traffic, deployment, seed=seed, keep_steps=out is not None)
    summary = result.summary()
    title = f"{deployment.model.name}, {traffic.name}, {_words(deployment.config)}"
    tables.show(console, tables.summary_table(summary, title))
    if out is not None:
        from app.simulate.run import plots

        out.mkdir(parents=True, exist_ok=True)
        write_requests(result.record, out / "requests.parquet")
        (out / "summary.json").write_text(json.dumps(summary.to_dict(), indent=1) + "\n", "utf-8")
        plots.save_run(result, out)
        console.print(f"written to {out}")
    return summary.to_dict()


def _words(config: SchedulerConfig) -> str:
    size = f" {config.constant_budget}" if config.budget == "fixed" else ""
    return f"{config.policy}, {config.budget}{size} budget"


def _capacity(
    console: Console,
    deployment: Deployment,
    lengths: Lengths,
    tbt_s: float,
    guess_qps: float,
    requests: int,
    seed: int,
) -> dict[str, Any]:
    found = search_capacity(
        deployment,
        lengths,
        tbt_s,
        guess_qps=guess_qps,
        num_requests=requests,
        seed=seed,
        on_probe=lambda p: console.print(
            f"{p.qps:8.3f} QPS  {'pass' if p.passed else 'fail'}  P99 TBT {p.tbt_p99:.3f} s  "
            f"median delay {p.scheduling_delay_p50:.2f} s"
        ),
    )
    console.print(f"capacity {found.qps:.3f} QPS, stopped by {found.limit}")
    return found.to_dict()


def _search(
    console: Console,
    target: str,
    workload: str,
    tbt_ms: float,
    qps: float,
    workers: int,
    requests: int,
) -> dict[str, Any]:
    model, _, device = target.partition("/")
    options = candidates(model, device or "a100")
    with _progress(console) as progress:
        task = progress.add_task("configurations", total=len(options))
        verdicts = search_configs(
            options,
            workload,
            tbt_ms / 1e3,
            qps,
            workers=workers,
            num_requests=requests,
            on_verdict=lambda _: progress.advance(task),
        )
    tables.show(console, tables.verdict_table(verdicts, qps))
    return {"verdicts": [v.to_dict() for v in verdicts]}


def _paper(
    console: Console,
    quick: bool,
    traces: Sequence[str],
    workers: int,
    cache: Path | None,
    out: Path | None,
) -> dict[str, Any]:
    requests, jobs = evaluation.plan(quick, recorded := evaluation.parse_traces(traces))
    with _progress(console) as progress:
        task = progress.add_task("capacity searches", total=len(jobs))
        results = run_jobs(jobs, cache, workers, lambda *_: progress.advance(task))
    rows = evaluation.rows(results, requests, quick, recorded)
    tables.show(console, tables.paper_table(rows))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        data = {"num_requests": requests, "rows": [r.to_dict() for r in rows]}
        (out / "paper.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        (out / "paper.md").write_text(tables.paper_markdown(rows), encoding="utf-8")
    return {"rows": [r.to_dict() for r in rows]}


def _figure7(console: Console, out: Path | None) -> dict[str, Any]:
    texts = {p: as_text(chart, figure7.NAMES) for p, chart in figure7.schedules().items()}
    for policy, text in texts.items():
        console.print(f"{policy}\n{text}\n", highlight=False, soft_wrap=True)
    if out is not None:
        figure7.write(out)
        console.print(f"written to {out}")
    return {"schedules": texts}


def _study(
    console: Console,
    name: str,
    engines: int | None,
    routing: str,
    seed: int,
    workers: int,
    out: Path | None,
) -> dict[str, Any]:
    if name not in STUDIES:
        raise ValueError(f"unknown study {name!r}; known: {', '.join(sorted(STUDIES))}")
    study, as_markdown = STUDIES[name]
    options: dict[str, Any] = {} if engines is None else {"num_engines": engines}
    if routing:
        if name != "routing":
            raise ValueError(f"--routing says nothing to the study {name!r}")
        options["routers"] = tuple(routing.split(","))
    rows: list[Any] = []
    found: Iterator[Any] = study(**options, seed=seed, workers=workers)
    with console.status(f"{name} study") as status:
        for row in found:
            rows.append(row)
            status.update(f"{name} study: {len(rows)} runs done")
    console.print(as_markdown(rows), highlight=False, soft_wrap=True)
    data = {"rows": [row.to_dict() for row in rows]}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        (out / f"{name}.md").write_text(as_markdown(rows), encoding="utf-8")
        console.print(f"written to {out}")
    return data


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
