"""`legato bench scaling`: a load that triples and falls again, engines that come and go with it.

A fleet of its own serves Poisson arrivals at a base rate, at three times that, and at the base rate
again, while Serve scales it by `app.fleet.autoscaling`. What clients saw is told for each part of
the run, the triple rate in two: until the last engine it brought serves, and from then on. Then the
same arrivals go through the simulator's fleet under the same policy.

Engines of one machine share its cores, which the policy does not know: `target` is the share of an
engine's time that may be used, and so small that three of them have cores enough. The base rate
follows from it and from the speed of the machine: `FILL` of what one engine may be used for, so
that three times as much is work for three.
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
from app.bench.studies.scaling_parts import (
    Phases,
    Tripled,
    changes,
    joins,
    mean_prompt_tokens,
    parts_of,
    whole,
)
from app.bench.studies.validate import read_log
from app.bench.terminal import Json, Out, console, output, say_duration, table
from app.simulate.run.deployment import Autoscale, Deployment
from app.simulate.run.recorded import measured_deployment
from app.simulate.run.simulation import SimulatedRun, simulate
from app.simulate.workload.requests import Workload

FILL = 0.75  # of an engine's target at the base rate: 2.25 of three at the triple
STARTS_S = 30.0  # of an engine, where none joined live
_LOOK_S = 0.5  # between two looks at the engines
_DECIDES_S = 2.0  # how often Serve's policy is shown new numbers
_LOOKS_BACK_S = 2 * _DECIDES_S  # the least that Serve takes; only the last number is read
_OUTLASTS_S = 60.0  # how long the last engines may take to go


def command(
    context: typer.Context,
    config: Config = Path("configs/serve/autoscaled.yaml"),
    lengths: LengthsOption = "256x32",
    qps: Annotated[
        float | None,
        typer.Option(min=0.01, help="The base rate; by the speed of the machine if absent."),
    ] = None,
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
    options = {"target": target, "ahead_s": 20.0, "smoothing_s": 10.0, "calm_s": calm_s}
    found = measure(config, Tripled(lengths, qps, phases, seed), options)
    publish(make_report(context, found, {"qps": found.pop("qps")}), as_json, out)
    if not as_json:
        _show(found)
    if found["num_cut"]:
        console.print(f"[red]{found['num_cut']} streams cut or refused:[/]", found["first_error"])
        raise typer.Exit(1)


def measure(config: Path, load: Tripled, options: Mapping[str, float]) -> dict[str, Any]:
    """Live, then simulated. Raises MeasurementError where the server does not come up."""

    def scaled(application: dict[str, Any]) -> None:
        for deployment in application.get("deployments") or []:
            if scaling := deployment.get("autoscaling_config"):
                scaling["metrics_interval_s"] = _DECIDES_S
                scaling["look_back_period_s"] = _LOOKS_BACK_S
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
            client = LoadClient(server.url, server.model)
            asyncio.run(client.run([Job(0.0, n, 8) for n in (1, 64, 512)]))  # sizes not yet seen
            qps = load.qps or base_qps(server, load.lengths, options["target"])
            jobs = load.jobs(qps)
            traces, looks = _live(server, client, jobs)
        scheduler, profile, runs = read_log(Path(folder))
        deployment = measured_deployment(
            replace(scheduler, prefix_cache=False), profile, [s for run in runs for s in run]
        )
    phases = load.phases
    objectives = {"tbt_ms": _ms(status.get("tbt_s")), "ttft_ms": _ms(status.get("ttft_s"))}
    joined_s = joins(looks)
    parts = parts_of(traces, looks, phases, objectives)
    cut = [trace for trace in traces if not trace.finished]
    replayed = simulated(jobs, deployment, options, joined_s, objectives)
    return {
        "qps": qps,
        "objectives": objectives,
        "num_requests": len(traces),
        "num_cut": len(cut),
        "first_error": next((trace.problem for trace in cut), None),
        "parts": [asdict(part) for part in parts],
        "engines": changes(looks),
        "most_engines": max(count for _, count in looks),
        "live": whole(traces, objectives),
        "simulated": replayed,
    }


def base_qps(server: OwnServer, lengths: str, target: float) -> float:
    """The rate whose prompts take `FILL` of the share `target` of one engine's time.

    Decodes are left out: at so small a share streams seldom run together.
    """
    rates = [float(engine.get("prefill_rate") or 0.0) for engine in server.engines()]
    if not max(rates, default=0.0):
        raise MeasurementError("the engine does not publish how fast it reads prompts: give --qps")
    return FILL * target * max(rates) / mean_prompt_tokens(lengths)


def _live(
    server: OwnServer, client: LoadClient, jobs: Sequence[Job]
) -> tuple[list[Trace], list[tuple[float, int]]]:
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


def simulated(
    jobs: Sequence[Job],
    deployment: Deployment,
    options: Mapping[str, float],
    joined_s: Sequence[float],
    objectives: Mapping[str, float | None],
) -> dict[str, Any]:
    """The same arrivals through the simulator's fleet.

    joined_s: when engines joined live. An engine starts for as long as the first of them did after
    the simulated policy wanted it, which depends on the arrivals before it alone.
    """
    workload = Workload(
        np.array([job.arrival_s for job in jobs]),
        np.array([job.num_prompt_tokens for job in jobs]),
        np.array([job.num_output_tokens for job in jobs]),
    )

    def fleet(start_s: float) -> SimulatedRun:
        scale = Autoscale("slack", dict(options), Bounds(1, 3), _DECIDES_S, start_s, drain_s=5.0)
        return simulate(workload, replace(deployment, routing="slack", autoscale=scale))

    run = fleet(STARTS_S)
    start_s = STARTS_S
    wanted_s = next((at_s for at_s, count in run.scaling if count > 1), None)
    if joined_s and wanted_s is not None:
        start_s = max(0.0, joined_s[0] - wanted_s)
        run = fleet(start_s)
    record = run.record
    ttft_s = np.array(record.first_token_s) - np.array(record.arrival_s)
    kept = (1e3 * ttft_s <= (objectives["ttft_ms"] or math.inf)) & (
        1e3 * np.array(record.max_gap_s) <= (objectives["tbt_ms"] or math.inf)
    )
    span_s = record.end_s - record.arrival_s[0]
    serve = [
        (at_s, sum(load.accepts > 0 for load in loads.values()))
        for (at_s, _), loads in zip(run.scaling, run.loads, strict=True)
    ]
    return {
        "start_s": start_s,
        "ttft_p50_ms": 1e3 * float(np.median(ttft_s)),
        "kept": float(kept.mean()),
        "goodput_qps": float(kept.sum()) / span_s,
        "wanted": changes(run.scaling),
        "engines": changes(serve),
        "most_engines": max(count for _, count in serve),
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
    for name, seen in (("live", found["engines"]), ("simulated", found["simulated"]["engines"])):
        steps = ", ".join(f"{row['engines']} from {row['at_s']:.0f} s" for row in seen)
        output.print(f"engines that serve, {name}: {steps}")
    both = [
        (name, f"{figures['ttft_p50_ms']:.0f}", f"{figures['goodput_qps']:.2f}")
        for name, figures in (("live", found["live"]), ("simulated", found["simulated"]))
    ]
    output.print(table("the same arrivals", ("", "TTFT P50, ms", "goodput, requests/s"), both))
