"""Steps in a live engine's event log: composition, time, and the gaps between them.

A log holds every plan and every answer (`telemetry.events`), so the steps of real traffic can be
held against a cost model that never saw them, and a machine's slowdown of the day be measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from actors.calibration.fit import Measurement, predict
from actors.scheduling.cost.model import CostModel
from actors.scheduling.event_log import Row, from_row
from actors.scheduling.events import Execute, Reconfigure, StepDone
from actors.scheduling.plan import SliceRow, StepShape
from app.simulate.hardware.step_ratios import StepRatios


@dataclass(frozen=True, slots=True)
class LiveStep:
    """One answered step. Times in seconds on the engine's clock.

    seconds: the slowest stage's. begin_s, end_s: on the first and the last stage. answered_s: when
    the core heard of it.
    """

    shape: StepShape
    seconds: float
    planned_s: float
    begin_s: float
    end_s: float
    answered_s: float


def shape_of(slices: Iterable[SliceRow]) -> StepShape:
    """The slices' shape for the cost model: a slice of one token counts as a decode."""
    decodes, context, prefills = 0, 0, []
    for _, start, num_tokens, _ in slices:
        if num_tokens == 1:
            decodes += 1
            context += start + 1
        else:
            prefills.append((start, num_tokens))
    return StepShape(decodes, context, tuple(prefills))


def runs(rows: Iterable[Row]) -> list[list[LiveStep]]:
    """The steps of a log, a new run beginning at every Reconfigure."""
    found: list[list[LiveStep]] = [[]]
    planned: dict[int, tuple[float, StepShape]] = {}
    for row in rows:
        if row["kind"] == "Config":
            continue
        now_s, event, instructions = from_row(row)
        if isinstance(event, Reconfigure):
            found.append([])
        if isinstance(event, StepDone):
            planned_s, shape = planned.pop(event.result.step_id)
            times = event.result.stage_times_s
            if times and shape.num_tokens:
                slowest_s = max(end - begin for begin, end in times)
                found[-1].append(
                    LiveStep(shape, slowest_s, planned_s, times[0][0], times[-1][1], now_s)
                )
        for instruction in instructions:
            if isinstance(instruction, Execute):
                plan = instruction.plan
                planned[plan.step_id] = (now_s, shape_of(plan.slices))
    return found


@dataclass(frozen=True, slots=True)
class Slowdown:
    """A machine against its profile.

    ratio: median of measured / predicted step time. sigma: spread of its logarithm (half of what
    lies between the 16th and the 84th percentile). gap_s: median pause of the first stage between
    two steps of which the second was waiting. answer_s: median from a step's end to the core.
    median_error, p95_error: of |predicted / measured - 1|, the profile as it is.
    """

    num_steps: int
    ratio: float
    sigma: float
    gap_s: float
    answer_s: float
    median_error: float
    p95_error: float


def slowdown(steps: Sequence[LiveStep], model: CostModel) -> Slowdown:
    """The machine's slowdown in these steps. Raises ValueError if there are none."""
    if not steps:
        raise ValueError("no step was answered")
    predicted = np.array([predict(model, step.shape) for step in steps])
    measured = np.array([step.seconds for step in steps])
    logs = np.log(measured / predicted)
    errors = np.abs(predicted / measured - 1.0)
    low, high = np.quantile(logs, (0.16, 0.84))
    waiting = [b.begin_s - a.end_s for a, b in pairwise(steps) if b.planned_s < a.end_s]
    return Slowdown(
        num_steps=len(steps),
        ratio=math.exp(float(np.median(logs))),
        sigma=float(high - low) / 2,
        gap_s=max(0.0, float(np.median(waiting))) if waiting else 0.0,
        answer_s=float(np.median([step.answered_s - step.end_s for step in steps])),
        median_error=float(np.median(errors)),
        p95_error=float(np.quantile(errors, 0.95)),
    )


def ratios(steps: Iterable[LiveStep], model: CostModel) -> StepRatios:
    """Step ratios to draw from: a simulation then has the machine's speed and its outliers."""
    alone: list[tuple[float, float]] = []
    mixed: list[tuple[float, float]] = []
    for step in steps:
        predicted_s = predict(model, step.shape)
        (mixed if step.shape.prefills else alone).append((predicted_s, step.seconds / predicted_s))
    return StepRatios(alone, mixed)


def measurements(steps: Iterable[LiveStep]) -> list[Measurement]:
    """The steps as measurements for `actors.calibration.fit`."""
    return [Measurement(step.shape, step.seconds) for step in steps]
