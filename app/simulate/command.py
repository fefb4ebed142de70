"""`legato simulate`: one deployment, its capacity, the cheapest configuration, or the paper."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from actors.scheduling.config import ConfigError, SchedulerConfig
from app.simulate import tables
from app.simulate.effects import check_effect
from app.simulate.hardware.deployments import load_model
from app.simulate.options import (
    EngineOptions,
    RunOptions,
    TaskOptions,
    TrafficOptions,
    command_of,
)
from app.simulate.paper import evaluation, figure7
from app.simulate.paper.timeline import as_text
from app.simulate.run.campaign import run_jobs
from app.simulate.run.capacity import search_capacity
from app.simulate.run.config_search import Candidate, candidates, is_cost_model, search_configs
from app.simulate.run.kinds import Question, fitting, judge_kinds, kinds_for
from app.simulate.run.record import write_requests
from app.simulate.run.simulation import simulate
from app.simulate.run.ways_search import advice, pairs, search_ways, warning
from app.simulate.studies import moving as moving_study
from app.simulate.studies import routing as routing_study
from app.simulate.studies import scaling as scaling_study
from app.simulate.way_options import WayOptions

# Name -> what yields its rows, and how they are shown.
STUDIES: dict[str, tuple[Callable[..., Iterator[Any]], Callable[[list[Any]], str]]] = {
    "moving": (moving_study.study, moving_study.as_markdown),
    "routing": (routing_study.study, routing_study.as_markdown),
    "scaling": (scaling_study.study, scaling_study.as_markdown),
}


def register(app: typer.Typer) -> None:
    """Add `simulate` to the command line."""
    app.command(
        "simulate",
        help="Simulate a deployment: one run, its capacity, the cheapest configuration, the paper.",
    )(command_of(run, TrafficOptions, EngineOptions, WayOptions, TaskOptions, RunOptions))


def run(
    traffic: TrafficOptions,
    engines: EngineOptions,
    ways: WayOptions,
    task: TaskOptions,
    options: RunOptions,
) -> None:
    console = Console(stderr=options.as_json)
    try:
        check_effect(traffic, engines, ways, task, options)
        if task.figure7:
            result = _figure7(console, options.out)
        elif task.paper:
            result = _paper(console, task, options)
        elif task.study:
            result = _study(console, task.study, engines, traffic.seed, options)
        elif task.search:
            result = _search(console, task, traffic, engines, ways, options.workers)
        elif task.capacity:
            result = _capacity(console, engines, ways, traffic)
        else:
            result = _run(console, engines, ways, traffic, options.out)
    except OSError as error:
        raise typer.BadParameter(f"{error.filename}: {error.strerror}") from error
    except (ConfigError, ValueError, KeyError) as error:
        raise typer.BadParameter(str(error)) from error
    if options.as_json:
        print(json.dumps(result, allow_nan=True))  # noqa: T201  the command's output


def _run(
    console: Console,
    engines: EngineOptions,
    ways: WayOptions,
    traffic: TrafficOptions,
    out: Path | None,
) -> dict[str, Any]:
    deployment, workload = ways.deployment(engines), traffic.generate()
    result = simulate(workload, deployment, seed=traffic.seed, keep_steps=out is not None)
    summary = result.summary()
    title = f"{deployment.model.name}, {workload.name}, {_words(deployment.config)}"
    tables.show(console, tables.summary_table(summary, title))
    objective_s = _objective(console, engines, deployment.config)
    if out is not None:
        from app.simulate.run import plots

        out.mkdir(parents=True, exist_ok=True)
        write_requests(result.record, out / "requests.parquet")
        (out / "summary.json").write_text(json.dumps(summary.to_dict(), indent=1) + "\n", "utf-8")
        plots.save_run(result, out)
        console.print(f"written to {out}")
    figures = {**summary.to_dict(), **objective_s}
    if result.moved is not None:
        figures["moved"] = result.moved.to_dict()
        console.print(tables.moves_line(result.moved))
    if result.handovers is None:
        return figures
    moved = result.handovers.to_dict()
    console.print(
        f"{moved['num_requests']} requests moved with {moved['num_bytes'] / 1e9:.3g} GB of KV, "
        f"the busiest link {moved['busiest_link']:.1%} of the time; from the first token to the "
        f"next step {moved['handover_p50_s']:.3g} s, P99 {moved['handover_p99_s']:.3g} s"
    )
    return {**figures, "handovers": moved}


def _words(config: SchedulerConfig) -> str:
    size = f" {config.constant_budget}" if config.budget == "fixed" else ""
    return f"{config.policy}, {config.budget}{size} budget"


def _objective(
    console: Console, engines: EngineOptions, config: SchedulerConfig
) -> dict[str, float]:
    assert config.tbt_s is not None
    rule = f", the {engines.slo} one of this cost model" if engines.slo else ""
    console.print(f"TBT objective {1e3 * config.tbt_s:.4g} ms{rule}")
    return {"tbt_objective_s": config.tbt_s}


def _capacity(
    console: Console, engines: EngineOptions, ways: WayOptions, traffic: TrafficOptions
) -> dict[str, Any]:
    deployment, served = ways.deployment(engines), traffic.of_search().read()
    objective = _objective(console, engines, deployment.config)
    found = search_capacity(
        deployment,
        served,
        objective["tbt_objective_s"],
        guess_qps=traffic.rate,
        on_probe=lambda p: console.print(
            f"{p.qps:8.3f} QPS  {'pass' if p.passed else 'fail'}  P99 TBT {p.tbt_p99:.3f} s  "
            f"median delay {p.scheduling_delay_p50:.2f} s"
        ),
    )
    console.print(f"capacity {found.qps:.3f} QPS, stopped by {found.limit}")
    return {**found.to_dict(), **objective}


def _search(
    console: Console,
    task: TaskOptions,
    traffic: TrafficOptions,
    engines: EngineOptions,
    ways: WayOptions,
    workers: int,
) -> dict[str, Any]:
    found, spec = candidates(task.search), traffic.of_search()
    spec.read()  # what is wrong in it is said once, before anything is searched
    model = load_model(task.search) if is_cost_model(task.search) else None
    tbt_s = engines.tbt_s(model)
    if task.ways:
        asked = task.ways_searched
        name = model.name if model else task.search
        division = ways.divided(asked[-1], 1, name) if len(asked) > 1 else None
        question = Question(spec, tbt_s, task.gpus or 1, asked, division)
        return _search_ways(console, found, question, workers)
    with _progress(console) as progress:
        bar = progress.add_task("configurations", total=len(found))
        verdicts = search_configs(
            found, spec, tbt_s, traffic.rate, workers, lambda: progress.advance(bar)
        )
    tables.show(console, tables.verdict_table(verdicts, traffic.rate))
    return {"verdicts": [v.to_dict() for v in verdicts]}


def _search_ways(
    console: Console, options: list[Candidate], question: Question, workers: int
) -> dict[str, Any]:
    fit = fitting(options, question.num_gpus, question.ways)
    with _progress(console) as progress:
        bar = progress.add_task("kinds of engines", total=len(fit))
        verdicts = judge_kinds(fit, question, workers, lambda: progress.advance(bar))
        progress.update(bar, completed=len(fit))  # not all had to be judged
        kinds = kinds_for(verdicts, question.num_gpus)
        then = progress.add_task("ways", total=len(pairs(kinds, question)))
        results = search_ways(kinds, question, workers, lambda: progress.advance(then))
    told = advice(results, question)
    tables.show(console, tables.layout_table(results, question.num_gpus))
    console.print(told, highlight=False, soft_wrap=True)
    doubt = warning(results, question.traffic.read().num_requests)
    if doubt:
        console.print(doubt, highlight=False, soft_wrap=True)
    return {
        "kinds": [v.to_dict() for v in verdicts],
        "layouts": [result.to_dict() for result in results],
        "tbt_objective_s": question.tbt_s,
        "advice": told,
        "warning": doubt,
    }


def _paper(console: Console, task: TaskOptions, options: RunOptions) -> dict[str, Any]:
    recorded = evaluation.parse_traces(task.trace or [])
    requests, jobs = evaluation.plan(task.quick, recorded)
    with _progress(console) as progress:
        bar = progress.add_task("capacity searches", total=len(jobs))
        results = run_jobs(jobs, options.cache, options.workers, lambda *_: progress.advance(bar))
    rows = evaluation.rows(results, requests, task.quick, recorded)
    tables.show(console, tables.paper_table(rows))
    data = [row.to_dict() for row in rows]
    if options.out is not None:
        report = {"num_requests": requests, "rows": data}
        _write_report(options.out, "paper", report, tables.paper_markdown(rows))
    return {"rows": data}


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
    engines: EngineOptions,
    seed: int,
    options: RunOptions,
) -> dict[str, Any]:
    if name not in STUDIES:
        raise ValueError(f"unknown study {name!r}; known: {', '.join(sorted(STUDIES))}")
    study, as_markdown = STUDIES[name]
    given: dict[str, Any] = {}
    if engines.replicas is not None:
        if name == "moving":
            raise ValueError("--replicas has no effect with the study 'moving'")
        given["num_engines"] = engines.replicas
    if engines.routing:
        if name != "routing":
            raise ValueError(f"--routing has no effect with the study {name!r}")
        given["routers"] = tuple(engines.routing.split(","))
    rows: list[Any] = []
    found: Iterator[Any] = study(**given, seed=seed, workers=options.workers)
    with console.status(f"{name} study") as status:
        for row in found:
            rows.append(row)
            status.update(f"{name} study: {len(rows)} runs done")
    console.print(as_markdown(rows), highlight=False, soft_wrap=True)
    data = {"rows": [row.to_dict() for row in rows]}
    if options.out is not None:
        _write_report(options.out, name, data, as_markdown(rows))
        console.print(f"written to {options.out}")
    return data


def _write_report(folder: Path, name: str, data: dict[str, Any], markdown: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(markdown, encoding="utf-8")


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
