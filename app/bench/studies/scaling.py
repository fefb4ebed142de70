"""`legato bench scaling`: a load that triples and falls again, engines that come and go with it.

A fleet of its own serves Poisson arrivals at a base rate, at three times that, and at the base rate
again, while Serve scales it by `app.fleet.autoscaling`. What clients saw is told for each part of
the run, the triple rate in two: until the last engine it brought serves, and from then on. Then the
same arrivals go through the simulator's fleet under the same policy.

Engines of one machine share its cores, which the policy does not know: `target` is the share of an
engine's time that may be used, and so small that three of them have cores enough.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from actors.fleet.scaling import Bounds
from app.bench.chaos.command import Config
from app.bench.chaos.own_server import OwnServer, own_server
from app.bench.load.client import Job, LoadClient, Trace
from app.bench.load.workload import LengthsOption
from app.bench.report import MeasurementError, make_report, publish
from app.bench.studies.live_engine import NO_DRAFTS
from app.bench.studies.scaling_parts import Phases, changes, cold_starts, parts_of, tripled, whole
from app.bench.studies.validate import read_log
from app.bench.terminal import Json, Out, console, output, say_duration, table
from app.simulate.run.deployment import Autoscale, Deployment
from app.simulate.run.recorded import measured_deployment
from app.simulate.run.simulation import simulate
from app.simulate.workload.requests import Workload

_LOOK_S = 0.5  # between two looks at the engines
_DECIDES_S = 2.0  # how often Serve's policy is shown new numbers
_OUTLASTS_S = 60.0  # how long the last engines may take to go


def command(
    context: typer.Context,
    config: Config = Path("configs/serve/autoscaled.yaml"),
    lengths: LengthsOption = "256x64",
    qps: Annotated[float, typer.Option(min=0.01, help="The base rate.")] = 0.8,
    before_s: Annotated[float, typer.Option(min=5.0, help="At the base rate.")] = 30.0,
    during_s: Annotated[float, typer.Option(min=10.0, help="At three times that.")] = 100.0,
    after_s: Annotated[float, typer.Option(min=5.0, help="At the base rate again.")] = 80.0,
    target: Annotated[
        float, typer.Option(min=0.05, max=1.0, help="Share of an engine's time to be used.")
    ] = 0.06,
    calm_s: Annotated[float, typer.Option(min=1.0, help="Before an engine is given up.")] = 20.0,
    seed: Annotated[int, typer.Option(help="Of the arrivals.")] = 0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """A load that triples and falls again: engines over time, promises kept, streams cut.

    Exits with status 1 when a stream was cut or refused.
    """
    phases = Phases(before_s, during_s, after_s)
    say_duration(phases.total_s + 60, phases.total_s + 180, "a fleet of its own under load")
    jobs = tripled(lengths, qps, phases, seed)
    options = {"target": target, "ahead_s": 20.0, "smoothing_s": 10.0, "calm_s": calm_s}
    found = measure(config, jobs, phases, options)
    publish(make_report(context, found), as_json, out)
    if not as_json:
        _show(found)
    if found["num_cut"]:
        console.print(f"[red]{found['num_cut']} streams cut or refused:[/]", found["first_error"])
        raise typer.Exit(1)


def measure(
    config: Path, jobs: Sequence[Job], phases: Phases, options: Mapping[str, float]
) -> dict[str, Any]:
    """Live, then simulated. Raises MeasurementError where the server does not come up."""

    def scaled(application: dict[str, Any]) -> None:
        for deployment in application.get("deployments") or []:
            if scaling := deployment.get("autoscaling_config"):
                scaling["metrics_interval_s"] = _DECIDES_S
                scaling["look_back_period_s"] = _DECIDES_S
                scaling["policy"]["policy_kwargs"] = {"scaling": "slack", **options}

    with tempfile.TemporaryDirectory(prefix="legato-scaling-") as folder:
        sections: dict[str, Mapping[str, Any]] = {
            "telemetry": {"directory": folder, "events": True},
            "parallel": {"threads_per_rank": 1},
            **NO_DRAFTS,
        }
        log = Path("out/scaling-server.log")
        with own_server(config, sections, log, change=scaled) as server:
            status = server.status()
            traces, looks = _live(server, jobs, phases)
        scheduler, profile, runs = read_log(Path(folder))
        deployment = measured_deployment(
            replace(scheduler, prefix_cache=False), profile, [s for run in runs for s in run]
        )
    objectives = {"tbt_ms": _ms(status.get("tbt_s")), "ttft_ms": _ms(status.get("ttft_s"))}
    starts_s = cold_starts(looks, phases)
    parts = parts_of(traces, looks, phases, objectives)
    cut = [trace for trace in traces if not trace.finished]
    start_s = starts_s[0] if starts_s else 30.0
    simulated = _simulated(jobs, deployment, options, start_s, objectives)
    return {
        "objectives": objectives,
        "num_requests": len(traces),
        "num_cut": len(cut),
        "first_error": next((trace.error for trace in cut if trace.error), None),
        "parts": [asdict(part) for part in parts],
        "engines": changes(looks),
        "most_engines": max(count for _, count in looks),
        "live": whole(traces, objectives),
        "start_s": start_s,
        "simulated": simulated,
    }


def _live(
    server: OwnServer, jobs: Sequence[Job], phases: Phases
) -> tuple[list[Trace], list[tuple[float, int]]]:
    client = LoadClient(server.url, server.model)
    asyncio.run(client.run([Job(0.0, n, 8) for n in (1, 64, 512)]))  # sizes of step not yet seen
    looks: list[tuple[float, int]] = []
    over = threading.Event()
    begin_s = time.perf_counter()

    def look() -> None:
        while not over.wait(_LOOK_S):
            engines = server.engines()
            if engines:
                serving = sum(engine.get("state") == "serving" for engine in engines)
                looks.append((time.perf_counter() - begin_s, serving))

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    traces = asyncio.run(client.run(jobs))
    until_s = time.perf_counter() + _OUTLASTS_S
    while time.perf_counter() < until_s and (not looks or looks[-1][1] > looks[0][1]):
        time.sleep(_LOOK_S)
    over.set()
    watcher.join()
    if not looks:
        raise MeasurementError("the server did not say what engines it has")
    return traces, looks


def _simulated(
    jobs: Sequence[Job],
    deployment: Deployment,
    options: Mapping[str, float],
    start_s: float,
    objectives: Mapping[str, float | None],
) -> dict[str, Any]:
    """The same arrivals through the simulator's fleet, an engine serving as late as live."""
    scale = Autoscale("slack", dict(options), Bounds(1, 3), _DECIDES_S, start_s, drain_s=5.0)
    workload = Workload(
        np.array([job.arrival_s for job in jobs]),
        np.array([job.num_prompt_tokens for job in jobs]),
        np.array([job.num_output_tokens for job in jobs]),
    )
    run = simulate(workload, replace(deployment, routing="slack", autoscale=scale))
    record = run.record
    ttft_s = np.array(record.first_token_s) - np.array(record.arrival_s)
    kept = (1e3 * ttft_s <= (objectives["ttft_ms"] or math.inf)) & (
        1e3 * np.array(record.max_gap_s) <= (objectives["tbt_ms"] or math.inf)
    )
    span_s = record.end_s - record.arrival_s[0]
    return {
        "ttft_p50_ms": 1e3 * float(np.median(ttft_s)),
        "goodput_qps": float(kept.sum()) / span_s,
        "wanted": changes(run.scaling),
        "most_engines": max(count for _, count in run.scaling),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _show(found: Mapping[str, Any]) -> None:
    rows = [
        (
            part["name"],
            f"{part['from_s']:.0f}",
            f"{part['num_requests']}",
            f"{part['kept']:.1%}",
            f"{part['ttft_p50_ms']:.0f}",
            f"{part['ttft_p99_ms']:.0f}",
            f"{part['tbt_p99_ms']:.0f}",
            f"{part['num_cut']}",
        )
        for part in found["parts"]
    ]
    columns = ("", "from, s", "requests", "kept", "TTFT P50, ms", "P99", "TBT P99, ms", "cut")
    output.print(table("what clients saw", columns, rows))
    for name, key in (("live", "engines"), ("simulated, wanted", "wanted")):
        seen = found["engines"] if key == "engines" else found["simulated"]["wanted"]
        steps = ", ".join(f"{row['engines']} from {row['at_s']:.0f} s" for row in seen)
        output.print(f"engines {name}: {steps}")
    both = [
        (name, f"{figures['ttft_p50_ms']:.0f}", f"{figures['goodput_qps']:.2f}")
        for name, figures in (("live", found["live"]), ("simulated", found["simulated"]))
    ]
    output.print(table("the same arrivals", ("", "TTFT P50, ms", "goodput, requests/s"), both))
