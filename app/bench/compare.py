"""`legato bench compare`: servers in turn on one machine, one client, one workload, one table.

The plan (YAML) names the servers and how to start each. Every server is started alone, probed, and
stopped before the next, for as many rounds as asked: machines drift, so only ratios within a run
mean anything. For the probe of speculation two servers run, which get the prompts in turn.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import ValidationError
from rich.table import Table

from app.bench.load.capacity import (
    TYPICAL_PROBES,
    CapacityObjective,
    CapacitySearch,
    measure_capacity,
)
from app.bench.load.client import Job, LoadClient
from app.bench.load.figures import LoadFigures, rate_together
from app.bench.load.serve import run_load
from app.bench.load.stall import measure_stall
from app.bench.load.workload import Load, lengths_of
from app.bench.plan import (
    CapacityProbe,
    ComparisonPlan,
    DecodeProbe,
    PrefillProbe,
    ServerPlan,
    StallProbe,
)
from app.bench.report import MeasurementError, make_report, publish
from app.bench.server_process import running
from app.bench.speculating import (
    Asked,
    Pair,
    SpeculationProbe,
    in_turn,
    pair_rows,
    pair_table,
)
from app.bench.terminal import Json, console, output, say_duration, table
from app.paths import locate

DECODE_TRIES = 3
_START_S = 30.0


def _decode(client: LoadClient, probe: DecodeProbe) -> dict[str, float]:
    return {
        f"decode {streams}, tokens/s": _decode_rate(client, probe, streams)
        for streams in probe.streams
    }


def _decode_rate(client: LoadClient, probe: DecodeProbe, streams: int) -> float:
    """A pause of the machine can keep short streams apart: try again before blaming the plan."""
    jobs = [Job(0.0, probe.prompt_tokens, probe.output_tokens)] * streams
    for _ in range(DECODE_TRIES):
        traces = asyncio.run(client.run(jobs))
        if error := next((t.error for t in traces if t.error), None):
            raise MeasurementError(f"decode: a stream failed: {error}")
        if rate := rate_together(traces):
            return rate
    raise MeasurementError(
        f"decode.output_tokens: {probe.output_tokens} are so few that {streams} streams "
        f"never decoded together in {DECODE_TRIES} tries"
    )


def _prefill(client: LoadClient, probe: PrefillProbe) -> dict[str, float]:
    rates = []
    for _ in range(probe.repeats):
        (trace,) = asyncio.run(client.run([Job(0.0, probe.prompt_tokens, 1)]))
        if not trace.ttft_s:
            raise MeasurementError(f"prefill: no first token ({trace.error or 'an empty answer'})")
        rates.append(probe.prompt_tokens / trace.ttft_s)
    return {f"prefill {probe.prompt_tokens}, tokens/s": statistics.median(rates)}


def _stall(client: LoadClient, probe: StallProbe) -> dict[str, float]:
    runs = [
        measure_stall(client, probe.streams, probe.prompt_tokens, probe.stream_tokens)
        for _ in range(probe.repeats)
    ]
    longest = statistics.median(run["longest_tbt_ms"] for run in runs)
    return {f"longest TBT, {probe.prompt_tokens}-token prompt, ms": longest}


def _capacity(
    make: Callable[[dict[str, Any]], LoadClient], server: ServerPlan, probe: CapacityProbe
) -> dict[str, float]:
    found = {}
    guess_qps = server.guess_qps
    for tbt_ms in sorted(probe.tbt_ms):
        client = make({"slo": {"tbt_ms": tbt_ms}} if server.sends_objective else {})
        load = Load(probe.lengths, guess_qps, probe.seconds)
        run_load(client, replace(load, qps=min(guess_qps, 2.0), seconds=5.0))  # warm up

        def serve(qps: float, client: LoadClient = client, load: Load = load) -> LoadFigures:
            return run_load(client, replace(load, qps=qps))

        search = CapacitySearch(guess_qps, probe.tolerance)
        qps, _ = measure_capacity(serve, CapacityObjective(tbt_ms), search, probe.seconds)
        found[f"capacity at P99 TBT {tbt_ms:g} ms, requests/s"] = qps
        guess_qps = max(guess_qps / 2, qps)
    return found


def _probe(server: ServerPlan, plan: ComparisonPlan, model: str, found: dict[str, float]) -> None:
    """Adds figures to `found` by name, those of one probe after another. Raises MeasurementError at
    the end, for all probes that gave none."""

    def make(extra: dict[str, Any]) -> LoadClient:
        return LoadClient(server.url, model, extra=extra)

    client, problems = make({}), list[str]()
    _warm_up(client)
    probes = (
        plan.decode and partial(_decode, client, plan.decode),
        plan.prefill and partial(_prefill, client, plan.prefill),
        plan.stall and partial(_stall, client, plan.stall),
        plan.capacity and partial(_capacity, make, server, plan.capacity),
    )
    for probe in probes:
        try:
            found.update(probe() if probe else {})
        except MeasurementError as error:
            problems.append(str(error))
    if problems:
        raise MeasurementError("; ".join(problems))


def _warm_up(client: LoadClient) -> None:
    warm = asyncio.run(client.run([Job(0.0, 64, 16)] * 4))
    if failed := next((t.error for t in warm if t.error is not None), None):
        raise MeasurementError(f"{client.root} answers with an error: {failed}")


def _speculate(
    name: str, plan: ComparisonPlan, probe: SpeculationProbe, logs: Path
) -> dict[str, list[Pair]]:
    """Pairs of a drafting server and the one without, by task."""
    drafting = plan.servers[name]
    plain = plan.servers[str(drafting.plain)]
    with (
        running(str(drafting.plain), plain, logs) as plain_model,
        running(name, drafting, logs) as model,
    ):
        time.sleep(plan.settle_s)
        both = (
            Asked(LoadClient(drafting.url, model), model),
            Asked(LoadClient(plain.url, plain_model), plain_model),
        )
        for asked in both:
            _warm_up(asked.client)
        return asyncio.run(in_turn(*both, probe.prompts(), probe.output_tokens))


def command(
    context: typer.Context,
    plan_file: Annotated[
        Path, typer.Argument(callback=locate, help="A plan, as configs/bench/compare_135m.yaml.")
    ],
    only: Annotated[str | None, typer.Option(help="Servers to run, comma separated.")] = None,
    as_json: Json = False,
    out: Annotated[
        Path, typer.Option(dir_okay=False, help="Write the JSON report to this file.")
    ] = Path("out/compare.json"),
) -> None:
    """Servers side by side: decode, prefill, stall, capacity, speculation; ratios to the first."""
    try:
        plan = ComparisonPlan.model_validate(yaml.safe_load(locate(plan_file).read_text()))
    except ValidationError as error:
        wrong = [(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors()]
        said = "; ".join(f"{key}: {message}" if key else message for key, message in wrong)
        raise typer.BadParameter(f"{plan_file}: {said}") from None
    except (OSError, yaml.YAMLError, UnicodeError) as error:
        raise typer.BadParameter(f"{plan_file}: {error}") from None
    names = only.split(",") if only else list(plan.servers)
    if unknown := [name for name in names if name not in plan.servers]:
        raise typer.BadParameter(f"no server {unknown[0]!r} in {plan_file}", param_hint="--only")
    if plan.capacity is not None:
        lengths_of(plan.capacity.lengths)  # refuses an unknown name before anything is started
    drafting = [n for n in names if plan.speculation is not None and plan.servers[n].plain]
    alone = names if plan.has_figures else []
    if not alone and not drafting:
        raise typer.BadParameter("nothing is measured of these servers", param_hint="--only")
    least_s, most_s = (
        plan.rounds * (len(alone) * a + len(drafting) * pair)
        for a, pair in zip(_alone_s(plan), _pair_s(plan), strict=True)
    )
    say_duration(least_s, most_s, f"servers: {len(names)}, rounds: {plan.rounds}")
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    pairs: dict[str, list[dict[str, list[Pair]]]] = {name: [] for name in drafting}
    failed: dict[str, str] = {}
    for number in range(plan.rounds):
        for name in names:
            if name in (*alone, *drafting):
                console.print(f"[bold]{name}[/], round {number + 1} of {plan.rounds}")
            try:
                if plan.has_figures:
                    with running(name, plan.servers[name], out.parent) as model:
                        time.sleep(plan.settle_s)
                        rounds[name].append({})
                        _probe(plan.servers[name], plan, model, rounds[name][-1])
                if plan.speculation is not None and name in pairs:
                    pairs[name].append(_speculate(name, plan, plan.speculation, out.parent))
            except MeasurementError as error:  # the other servers are measured all the same
                failed[name] = str(error)
                console.print(f"[yellow]{name}[/]: {error}")
            found = {
                "plan": plan.model_dump(),
                "rounds": rounds,
                "medians": {n: _medians(r) for n, r in rounds.items() if any(r)},
                "speculation": pair_rows(pairs),
                "failed": failed,
            }
            report = make_report(context, found)
            publish(report, False, out)  # after every server: a run cut short keeps what it has
    if as_json:
        publish(report, True, None)
    else:
        if report["medians"]:
            output.print(_table(report["medians"]))
        if report["speculation"]:
            output.print(pair_table(report["speculation"]))
    if failed:
        raise MeasurementError("not measured: " + "; ".join(map(": ".join, failed.items())))


def _alone_s(plan: ComparisonPlan) -> tuple[float, float]:
    """Expected seconds of one server in one round: (least, most)."""
    seconds = _START_S + plan.settle_s
    searches_s = len(plan.capacity.tbt_ms) * plan.capacity.seconds if plan.capacity else 0.0
    least, most = TYPICAL_PROBES
    return seconds + least * searches_s, 3 * seconds + most * searches_s


def _pair_s(plan: ComparisonPlan) -> tuple[float, float]:
    """Expected seconds of a drafting server and its plain one, both started: (least, most)."""
    seconds = 2 * _START_S + plan.settle_s
    return seconds, 3 * seconds


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    keys = dict.fromkeys(key for figures in rounds for key in figures)
    return {key: statistics.median(r[key] for r in rounds if key in r) for key in keys}


def _table(medians: dict[str, dict[str, float]]) -> Table:
    names = list(medians)
    rows = []
    for key in dict.fromkeys(key for figures in medians.values() for key in figures):
        first, *others = (medians[name].get(key, math.nan) for name in names)
        ratios = (first / value if value else math.inf for value in others)
        cells = (f"{value:.4g} ({ratio:.2f})" for value, ratio in zip(others, ratios, strict=True))
        rows.append((key, f"{first:.4g}", *cells))
    return table(f"medians; in brackets the ratio of {names[0]}", ("", *names), rows)
