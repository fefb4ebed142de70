"""Options of `legato simulate`: each field of a group is an option of the command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from actors.fleet.roles import WAYS
from actors.fleet.routers import ROUTERS
from app.paths import locate
from app.simulate.hardware.deployments import load_model
from app.simulate.hardware.interconnect import (
    INTERCONNECTS,
    kv_bytes_per_token,
    parse_interconnect,
    shape_of,
)
from app.simulate.run.deployment import Division
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
    acceptance: Annotated[
        float | None, typer.Option(help="Probability that a draft is right; absent: no drafts.")
    ] = None
    replicas: Annotated[
        int | None, typer.Option(help="Engines: 1, or a study's own number.", min=1)
    ] = None
    routing: Annotated[
        str, typer.Option(help=f"{', '.join(ROUTERS)}; with --study: some of them, else all.")
    ] = ""

    @property
    def tbt_s(self) -> float:
        return self.tbt_ms / 1e3

    def deployment(self, ways: WayOptions) -> Deployment:
        """Raises ValueError for options without effect or that contradict each other."""
        ways.check(self)
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
            drafter="none" if self.acceptance is None else "auto",
        )
        num_replicas, routing = self.replicas or ways.num_engines or 1, self.routing or "slack"
        division = ways.division(truth.name)
        return Deployment(
            config,
            truth,
            num_replicas=num_replicas,
            routing=routing,
            acceptance=self.acceptance,
            division=division,
        )


@dataclass(frozen=True)
class WayOptions:
    """How prompts and streams are divided over the engines."""

    way: Annotated[
        str, typer.Option(help=f"{', '.join(WAYS)}: which engines compute prompts, which decode.")
    ] = "colocated"
    prefill_engines: Annotated[
        int | None, typer.Option(help="Engines that only compute prompts.", min=1)
    ] = None
    decode_engines: Annotated[
        int | None, typer.Option(help="Engines that decode; flexible: prompts too.", min=1)
    ] = None
    interconnect: Annotated[
        str, typer.Option(help=f"{', '.join(INTERCONNECTS)} (nvlink), or GB/s,microseconds.")
    ] = ""
    shape: Annotated[
        str, typer.Option(help="Of configs/models/shapes, for the size of KV; else by the name.")
    ] = ""

    @property
    def num_engines(self) -> int:
        return (self.prefill_engines or 0) + (self.decode_engines or 0)

    def check(self, engines: EngineOptions) -> None:
        """Raises ValueError naming an option that is unknown, missing or without effect."""
        if self.way not in WAYS:
            raise ValueError(f"unknown way {self.way!r}; known: {', '.join(WAYS)}")
        numbers = {
            "--prefill-engines": self.prefill_engines,
            "--decode-engines": self.decode_engines,
        }
        if self.way == "colocated":
            given = {**numbers, "--interconnect": self.interconnect, "--shape": self.shape}
            for option, value in given.items():
                if value:
                    raise ValueError(f"{option} has no effect with --way colocated")
            return
        for option, value in numbers.items():
            if value is None:
                raise ValueError(f"--way {self.way} needs {option}")
        if engines.replicas is not None:
            raise ValueError(
                f"--replicas has no effect with --way {self.way}, which has two numbers"
            )
        if engines.admission != "all":
            message = "a stream that has begun is not refused where it goes on"
            raise ValueError(f"--admission {engines.admission} and --way {self.way}: {message}")

    def division(self, model: str) -> Division | None:
        """None: colocated."""
        if self.way == "colocated":
            return None
        shape = self.shape or shape_of(model)
        if not shape:
            raise ValueError(f"--way {self.way} needs --shape: {model!r} names no shape")
        interconnect = parse_interconnect(self.interconnect or "nvlink")
        return Division(
            self.way, self.prefill_engines or 0, interconnect, kv_bytes_per_token(shape)
        )


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

    @property
    def without_deployment(self) -> str:
        """The option of a task that simulates deployments of its own; "": of none."""
        tasks = ("search", "paper", "figure7", "study")
        return next((f"--{name}" for name in tasks if getattr(self, name)), "")


@dataclass(frozen=True)
class RunOptions:
    """How it is computed and what becomes of the result."""

    workers: Annotated[int, typer.Option(help="Processes for searches.", min=1)] = 1
    cache: Annotated[
        Path | None, typer.Option(help="With --paper: keep finished capacity searches here.")
    ] = None
    out: Annotated[Path | None, typer.Option(help="Write Parquet, JSON and plots here.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False
