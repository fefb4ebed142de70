"""Options of `legato simulate`: each field of a group is an option of the command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from actors.fleet.routers import ROUTERS
from app.paths import locate
from app.simulate.hardware.deployments import load_model
from app.simulate.run.simulation import Deployment, scheduler_config
from app.simulate.workload.requests import Workload, generate
from app.simulate.workload.specs import load_workload, parse_arrivals, parse_lengths
from app.simulate.workload.traces import read_trace


def command_of(run: Callable[..., None], *groups: type) -> Callable[..., None]:
    """A command for typer, which calls `run` with one object of each of these dataclasses."""

    def command(**values: Any) -> None:
        run(*[group(**{f.name: values[f.name] for f in fields(group)}) for group in groups])

    parameters = []
    for group in groups:
        hints = get_type_hints(group, include_extras=True)
        parameters += [
            parameter.replace(annotation=hints[parameter.name], kind=parameter.KEYWORD_ONLY)
            for parameter in inspect.signature(group).parameters.values()
        ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


@dataclass(frozen=True)
class TrafficOptions:
    workload: Annotated[
        str,
        typer.Option(help="sharegpt4, arxiv, fixed:P,O, uniform:LOW,HIGH,RATIO, zipf; or a file."),
    ] = "sharegpt4"
    arrivals: Annotated[
        str, typer.Option(help="poisson, gamma[:cv], bursty, diurnal, fixed or trace.")
    ] = "poisson"
    qps: Annotated[float, typer.Option(help="Requests per second.", min=1e-6)] = 1.0
    requests: Annotated[int, typer.Option(help="How many requests.", min=1)] = 512
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0

    def generate(self) -> Workload:
        file = locate(self.workload)
        if file.suffix in (".csv", ".parquet"):
            qps = None if self.arrivals == "trace" else self.qps
            return read_trace(str(file), qps, self.seed)
        if file.suffix in (".yaml", ".yml"):
            return load_workload(file, self.seed)
        arrivals, lengths = parse_arrivals(self.arrivals, self.qps), parse_lengths(self.workload)
        return generate(arrivals, lengths, self.requests, self.seed, self.workload)


@dataclass(frozen=True)
class EngineOptions:
    model: Annotated[
        str, typer.Argument(help="Cost model: a name in configs/hardware, or a JSON file.")
    ] = "yi-34b-a100-tp2"
    policy: Annotated[str, typer.Option(help="Scheduling policy.")] = "sarathi"
    budget: Annotated[str, typer.Option(help="fixed, profiled, adaptive or throttled.")] = (
        "adaptive"
    )
    token_budget: Annotated[
        int | None, typer.Option(help="Tokens of a fixed budget; 512 if absent.", min=1)
    ] = None
    tbt_ms: Annotated[float, typer.Option(help="TBT objective.", min=0.001)] = 200.0
    max_requests: Annotated[int, typer.Option(help="Sequences that run together.", min=1)] = 128
    admission: Annotated[str, typer.Option(help="all, predicted_peak or predictive.")] = "all"
    order: Annotated[str, typer.Option(help="Order of the queue.")] = "auto"
    replicas: Annotated[
        int | None, typer.Option(help="Engines: 1, or a study's own number.", min=1)
    ] = None
    routing: Annotated[
        str, typer.Option(help=f"{', '.join(ROUTERS)}; with --study: some of them, else all.")
    ] = ""

    @property
    def tbt_s(self) -> float:
        return self.tbt_ms / 1e3

    def deployment(self) -> Deployment:
        truth = load_model(self.model)
        config = scheduler_config(
            truth,
            policy=self.policy,
            budget=self.budget,
            token_budget=self.token_budget,
            tbt_s=self.tbt_s,
            max_requests=self.max_requests,
            admission=self.admission,
            order=self.order,
        )
        num_replicas, routing = self.replicas or 1, self.routing or "slack"
        return Deployment(config, truth, num_replicas=num_replicas, routing=routing)


@dataclass(frozen=True)
class TaskOptions:
    """One run, unless another is named."""

    capacity: Annotated[
        bool, typer.Option("--capacity", help="Search the highest load that meets the objective.")
    ] = False
    search: Annotated[
        str, typer.Option(help="MODEL/DEVICE: the cheapest TP, PP and budget for --qps.")
    ] = ""
    paper: Annotated[bool, typer.Option("--paper", help="Reproduce the paper's evaluation.")] = (
        False
    )
    figure7: Annotated[
        bool, typer.Option("--figure7", help="The paper's figure 7 under every policy.")
    ] = False
    study: Annotated[str, typer.Option(help="routing or scaling: a fleet under each of them.")] = ""
    quick: Annotated[bool, typer.Option(help="With --paper: a part of it, in a minute.")] = False
    trace: Annotated[
        list[str] | None, typer.Option(help="With --paper: DATASET=FILE, lengths in its place.")
    ] = None


@dataclass(frozen=True)
class RunOptions:
    """How it is computed and what becomes of the result."""

    workers: Annotated[int, typer.Option(help="Processes for searches.", min=1)] = 1
    cache: Annotated[
        Path | None, typer.Option(help="With --paper: keep finished capacity searches here.")
    ] = None
    out: Annotated[Path | None, typer.Option(help="Write Parquet, JSON and plots here.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False
