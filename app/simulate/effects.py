"""Which options of `legato simulate` act with which task; the others are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from app.simulate.options import (
    EngineOptions,
    RunOptions,
    TaskOptions,
    TrafficOptions,
)
from app.simulate.way_options import WayOptions

_TRAFFIC = {f.name for f in fields(TrafficOptions)}
_DEPLOYMENT = {f.name for group in (EngineOptions, WayOptions) for f in fields(group)}
_SEARCH = {"tbt_ms", "slo", "ways", "gpus", "interconnect", "shape", "workers"}

# Task -> the options that act with it, beside its own and --json; "": one run.
TAKES: Mapping[str, set[str]] = {
    "figure7": {"out"},
    "paper": {"quick", "trace", "workers", "cache", "out"},
    "study": {"replicas", "routing", "seed", "workers", "out"},
    "search": _TRAFFIC | _SEARCH,
    "capacity": (_TRAFFIC | _DEPLOYMENT) - {"drain"},
    "": _TRAFFIC | _DEPLOYMENT | {"out"},
}


def check_effect(
    traffic: TrafficOptions,
    engines: EngineOptions,
    ways: WayOptions,
    task: TaskOptions,
    options: RunOptions,
) -> None:
    """Raises ValueError naming an option that is given and does not act with the task."""
    takes = TAKES[task.name] | {task.name, "as_json"}
    for group in (task, traffic, engines, ways, options):
        for f in fields(group):
            if f.name in takes or getattr(group, f.name) == f.default:
                continue
            option = "MODEL" if f.name == "model" else f"--{f.name.replace('_', '-')}"
            if task.name:
                raise ValueError(f"{option} has no effect with --{task.name}")
            tasks = " or ".join(f"--{name}" for name, given in TAKES.items() if f.name in given)
            raise ValueError(f"{option} has no effect without {tasks}")
    if task.name == "search":
        _check_search(traffic, ways, task)


def _check_search(traffic: TrafficOptions, ways: WayOptions, task: TaskOptions) -> None:
    if not task.ways and task.gpus is not None:
        raise ValueError("--gpus has no effect without --ways")
    if not task.ways or task.ways_searched == ("colocated",):
        for name in ("interconnect", "shape"):
            if getattr(ways, name):
                raise ValueError(f"--{name} has no effect without --ways split or flexible")
    if task.ways and task.gpus is None:
        raise ValueError("--ways needs --gpus")
    if task.ways and traffic.qps is not None:
        raise ValueError("--qps has no effect with --gpus, whose highest load is searched")
