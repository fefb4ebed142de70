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
from actors.scheduling.build import DECODE_STEPS, build_core
from actors.scheduling.cost.model import CostModel
from app.paths import locate
from app.simulate.run.simulation import scheduler_config
from app.simulate.workload.arrivals import Arrivals
from app.simulate.workload.requests import Workload, generate
from app.simulate.workload.specs import (
    TrafficSpec,
    names_yaml,
    parse_arrivals,
    parse_lengths,
    read_file,
)
from app.simulate.workload.traces import SUFFIXES, read_trace


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
        typer.Option(
            help="sharegpt4, arxiv, fixed:P,O, uniform:LOW,HIGH,RATIO, zipf, mixed, each also "
            "with /DIVISOR; or a file."
        ),
    ] = "sharegpt4"
    arrivals: Annotated[
        str, typer.Option(help="poisson (default), gamma[:cv], bursty, diurnal, fixed or trace.")
    ] = ""
    qps: Annotated[float | None, typer.Option(help="Requests per second (1).", min=1e-6)] = None
    requests: Annotated[int | None, typer.Option(help="How many requests (512).", min=1)] = None
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0

    @property
    def rate(self) -> float:
        """The load of a run, or where a search begins."""
        return 1.0 if self.qps is None else self.qps

    def generate(self) -> Workload:
        """The requests of one run; all of a file's."""
        if names_yaml(self.workload):
            self._refuse("requests", "arrivals", "qps")
            return read_file(self.workload, self.seed)
        if self.workload.endswith(SUFFIXES):
            as_recorded = self.arrivals == "trace"
            self._refuse("requests", *(("qps",) if as_recorded else ()))
            process = None if as_recorded else self._process
            return read_trace(locate(self.workload), process, self.seed)
        lengths = parse_lengths(self.workload)
        return generate(self._process, lengths, self.num_requests, self.seed, self.workload)

    def of_search(self) -> TrafficSpec:
        if self.arrivals == "trace":
            self._refuse("requests")
        return TrafficSpec(self.workload, self.arrivals or "poisson", self.num_requests, self.seed)

    @property
    def num_requests(self) -> int:
        return 512 if self.requests is None else self.requests

    @property
    def _process(self) -> Arrivals:
        return parse_arrivals(self.arrivals or "poisson", self.rate)

    def _refuse(self, *names: str) -> None:
        for name in names:
            if getattr(self, name):
                raise ValueError(f"--{name} has no effect: {self.workload} says it")


@dataclass(frozen=True)
class EngineOptions:
    model: Annotated[
        str,
        typer.Argument(
            help="Cost model: a name in configs/hardware, a JSON file, or a model folder."
        ),
    ] = "yi-34b-a100-tp2"
    policy: Annotated[str, typer.Option(help="Scheduling policy.")] = "sarathi"
    budget: Annotated[str, typer.Option(help="auto, fixed, profiled, adaptive or throttled.")] = (
        "adaptive"
    )
    token_budget: Annotated[
        int | None, typer.Option(help="Tokens of a fixed budget; 512 if absent.", min=1)
    ] = None
    tbt_ms: Annotated[float | None, typer.Option(help="TBT objective (200).", min=0.001)] = None
    slo: Annotated[
        str, typer.Option(help="In its place strict or relaxed: 5 or 25 decode steps of 32 at 4k.")
    ] = ""
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

    def tbt_s(self, model: CostModel | None) -> float:
        """The TBT objective of engines with this cost model; None: they have several."""
        if not self.slo:
            return (200.0 if self.tbt_ms is None else self.tbt_ms) / 1e3
        if self.slo not in DECODE_STEPS:
            raise ValueError(f"unknown --slo {self.slo!r}; known: {', '.join(DECODE_STEPS)}")
        if self.tbt_ms is not None:
            raise ValueError(f"--tbt-ms has no effect with --slo {self.slo}")
        if model is None:
            raise ValueError("--slo is of one cost model: give --tbt-ms, the same for all engines")
        ruled = scheduler_config(model, tbt_rule=self.slo, max_requests=self.max_requests)
        tbt_s = build_core(ruled).config.tbt_s
        assert tbt_s is not None
        return tbt_s


TASKS = ("figure7", "paper", "study", "search", "capacity")  # the first one given is run


@dataclass(frozen=True)
class TaskOptions:
    """One run, unless another is named."""

    capacity: Annotated[
        bool, typer.Option("--capacity", help="Search the highest load that meets the objective.")
    ] = False
    search: Annotated[
        str,
        typer.Option(
            help="MODEL/DEVICE, a model folder or a cost model: the cheapest TP, PP and budget for "
            "--qps, or with --ways what holds most on --gpus."
        ),
    ] = ""
    ways: Annotated[
        str, typer.Option(help=f"With --search: some of {','.join(WAYS)}, all engines divided so.")
    ] = ""
    gpus: Annotated[
        int | None, typer.Option(help="With --ways: the GPUs that every candidate has.", min=1)
    ] = None
    paper: Annotated[bool, typer.Option("--paper", help="Reproduce the paper's evaluation.")] = (
        False
    )
    figure7: Annotated[
        bool, typer.Option("--figure7", help="The paper's figure 7 under every policy.")
    ] = False
    study: Annotated[
        str, typer.Option(help="routing, scaling or moving: a fleet under each of them.")
    ] = ""
    quick: Annotated[bool, typer.Option(help="With --paper: a part of it, in a minute.")] = False
    trace: Annotated[
        list[str] | None, typer.Option(help="With --paper: DATASET=FILE, lengths in its place.")
    ] = None

    @property
    def name(self) -> str:
        """The field of the task that is asked for; "": one run."""
        return next((name for name in TASKS if getattr(self, name)), "")

    @property
    def ways_searched(self) -> tuple[str, ...]:
        """Those of --ways in the order of `WAYS`; colocated ones stand beside any."""
        asked = {"colocated", *self.ways.split(",")}
        if unknown := sorted(asked - {*WAYS}):
            raise ValueError(f"unknown --ways {', '.join(unknown)}; known: {', '.join(WAYS)}")
        return tuple(way for way in WAYS if way in asked)


@dataclass(frozen=True)
class RunOptions:
    """How it is computed and what becomes of the result."""

    workers: Annotated[int, typer.Option(help="Processes for searches.", min=1)] = 1
    cache: Annotated[
        Path | None, typer.Option(help="With --paper: keep finished capacity searches here.")
    ] = None
    out: Annotated[Path | None, typer.Option(help="Write Parquet, JSON and plots here.")] = None
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; tables go to standard error.")
    ] = False
