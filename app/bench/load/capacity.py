"""`legato capacity`: the highest load that any OpenAI URL sustains within its objectives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from app.bench.load.client import LoadClient, first_model
from app.bench.load.figures import LoadFigures, figures_table
from app.bench.load.serve import DEFAULT_URL, ApiKey, Model, Url, run_load
from app.bench.load.workload import LengthsOption, Load
from app.bench.report import MeasurementError, make_report, publish
from app.bench.terminal import Json, Out, console, duration, output, say_duration

MEDIAN_TTFT_MS = 2000.0
TYPICAL_PROBES = (6, 12)  # of a search whose guess is within a small factor of the capacity


@dataclass(frozen=True, slots=True)
class CapacityObjective:
    """A load passes if P99 TBT and median TTFT are within these and no request fails."""

    tbt_ms: float
    ttft_p50_ms: float = MEDIAN_TTFT_MS

    def passed(self, figures: LoadFigures) -> bool:
        return figures.num_failed == 0 and self.hold(figures.tbt_p99_ms, figures.ttft_p50_ms)

    def hold(self, tbt_p99_ms: float, ttft_p50_ms: float) -> bool:
        return tbt_p99_ms <= self.tbt_ms and ttft_p50_ms <= self.ttft_p50_ms


@dataclass(slots=True)
class CapacitySearch:
    """Brackets a capacity in strides, then bisects; the caller judges each load.

    qps: the load to try next, at first the guess. low_qps: the highest that passed (the capacity
    once `done`). high_qps: the lowest that failed.
    """

    qps: float
    tolerance: float
    low_qps: float = 0.0
    high_qps: float = math.inf

    @property
    def done(self) -> bool:
        if self.high_qps == math.inf:
            return False
        narrow = self.high_qps - self.low_qps <= self.tolerance * self.high_qps
        return narrow or (self.low_qps == 0.0 and self.high_qps < 0.05)

    @property
    def num_left(self) -> int | None:
        """Remaining probes; None until one load has passed and one failed."""
        if self.done:
            return 0
        if self.low_qps == 0.0 or self.high_qps == math.inf:
            return None
        width = (self.high_qps - self.low_qps) / (self.tolerance * self.high_qps)
        return max(1, math.ceil(math.log2(width)))

    def judge(self, passed: bool) -> None:
        """Record whether the load `qps` passed, and choose the next."""
        if passed:
            self.low_qps = self.qps
        else:
            self.high_qps = self.qps
        if self.high_qps == math.inf:
            self.qps *= 1.5  # small strides, because an overloaded probe drains slowly
        elif self.low_qps:
            self.qps = (self.low_qps + self.high_qps) / 2
        else:
            self.qps = self.high_qps / 2


def search_capacity(search: CapacitySearch, passes: Callable[[float], bool]) -> float:
    """The capacity, with a synchronous judgment of each load."""
    while not search.done:
        search.judge(passes(search.qps))
    return search.low_qps


def measure_capacity(
    probe: Callable[[float], LoadFigures],
    objective: CapacityObjective,
    search: CapacitySearch,
    probe_s: float,
) -> tuple[float, list[LoadFigures]]:
    """The highest load that passes, and the figures of all probes.

    probe: serves a load of the given requests per second. probe_s: its approximate duration.
    Raises MeasurementError if a probe got no answer at all.
    """
    probes: list[LoadFigures] = []

    def passes(qps: float) -> bool:
        figures = probe(qps)
        figures.check_measured()
        probes.append(figures)
        return objective.passed(figures)

    while not search.done:
        qps = search.qps
        search.judge(passes(qps))
        say_probe(qps, probes[-1], objective, search, probe_s)
    return search.low_qps, probes


def say_probe(
    qps: float,
    figures: LoadFigures,
    objective: CapacityObjective,
    search: CapacitySearch,
    probe_s: float,
) -> None:
    """Print one line: the probe's figures and the progress of the search."""
    left = search.num_left
    if left is None:
        rest = "no load has failed yet" if search.low_qps else "no load has passed yet"
    else:
        rest = f"about {left} more, {duration(left * probe_s)}" if left else "done"
    console.print(
        f"  {qps:6.2f} requests/s  P99 TBT {figures.tbt_p99_ms:7.1f} ms  "
        f"median TTFT {figures.ttft_p50_ms:7.0f} ms  "
        f"{'ok  ' if objective.passed(figures) else 'over'}  ({rest})",
        soft_wrap=True,
    )


def command(
    context: typer.Context,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    model: Model = None,
    tbt_ms: Annotated[float, typer.Option(min=1.0, help="P99 TBT objective.")] = 100.0,
    ttft_ms: Annotated[
        float, typer.Option(min=1.0, help="Median TTFT that a load must keep too.")
    ] = MEDIAN_TTFT_MS,
    lengths: LengthsOption = "sharegpt/8",
    guess_qps: Annotated[float, typer.Option(min=0.05, help="The load to begin with.")] = 4.0,
    seconds: Annotated[float, typer.Option(min=5.0, help="Arrivals of one probe.")] = 40.0,
    tolerance: Annotated[
        float, typer.Option(min=0.005, max=0.5, help="Where the bisection ends.")
    ] = 0.05,
    seed: int = 0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """The highest Poisson load a running server sustains under a P99 TBT objective."""
    load = Load(lengths, guess_qps, seconds, seed=seed)
    if all(job.num_output_tokens < 2 for job in load.jobs()):
        raise typer.BadParameter(
            f"{lengths!r}: answers of one token have no time between tokens to judge",
            param_hint="--lengths",
        )
    model = model or first_model(url, api_key)
    client, objective = LoadClient(url, model, api_key=api_key), CapacityObjective(tbt_ms, ttft_ms)
    few, many = TYPICAL_PROBES
    say_duration(
        few * seconds, many * seconds, f"{few} to {many} probes of {seconds:g} s from a good guess"
    )
    run_load(client, replace(load, qps=min(guess_qps, 1.0), seconds=5.0)).check_measured()  # warm
    qps, probes = measure_capacity(
        lambda qps: run_load(client, replace(load, qps=qps), tbt_ms=tbt_ms),
        objective,
        CapacitySearch(guess_qps, tolerance),
        seconds,
    )
    found = {"capacity_qps": qps, "probes": [figures.to_dict() for figures in probes]}
    publish(make_report(context, found, {"model": model}), as_json, out)
    if not as_json:
        output.print(figures_table(sorted(probes, key=lambda f: f.qps_offered)))
        output.print(
            f"[bold]capacity {qps:.2f} requests/s[/] at P99 TBT <= {tbt_ms:g} ms "
            f"and median TTFT <= {ttft_ms:g} ms"
        )
    if not qps:
        lowest = min(figures.qps_offered for figures in probes)
        raise MeasurementError(f"no load passed, not even {lowest:.2f} requests/s")
