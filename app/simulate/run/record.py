"""The record of a simulated run, and the figures computed from it.

Recording runs in the hot loop, so it uses plain lists and arrays. Figures follow
`app.telemetry.definitions`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.scheduling.events import PLAIN_FIELDS, OutputRow, Refuse

Floats = NDArray[np.float64]


@dataclass(slots=True)
class Steps:
    """One entry per step, in order of completion: time, place, duration and composition."""

    replica: array[int] = field(default_factory=lambda: array("i"))
    start_s: array[float] = field(default_factory=lambda: array("d"))
    end_s: array[float] = field(default_factory=lambda: array("d"))
    stage_s: array[float] = field(default_factory=lambda: array("d"))
    bubble_s: array[float] = field(default_factory=lambda: array("d"))
    prefill_tokens: array[int] = field(default_factory=lambda: array("i"))
    decode_tokens: array[int] = field(default_factory=lambda: array("i"))

    def __len__(self) -> int:
        return len(self.start_s)


def logged_steps(rows: list[dict[str, Any]]) -> dict[str, Steps]:
    """Each engine's steps by the iteration rows of a log; times since the earliest of all."""
    origin_s = min(row["submitted_s"] for row in rows)
    engines: dict[str, Steps] = {}
    for row in sorted(rows, key=lambda row: (row["engine"], row["submitted_s"])):
        if not row["stages_s"]:
            continue
        steps = engines.setdefault(row["engine"], Steps())
        steps.replica.append(0)
        steps.start_s.append(row["stages_s"][0][0] - origin_s)
        steps.end_s.append(row["stages_s"][-1][1] - origin_s)
        steps.stage_s.append(max(end_s - begin_s for begin_s, end_s in row["stages_s"]))
        steps.bubble_s.append(0.0)
        steps.prefill_tokens.append(row["num_prefill_tokens"])
        steps.decode_tokens.append(row["num_decode_tokens"])
    return engines


class RunRecord:
    """Times of every request (columns indexed by request id, seconds, NaN: never) and token."""

    def __init__(self, num_requests: int, keep_steps: bool = False) -> None:
        nan = math.nan
        self.arrival_s = [nan] * num_requests
        self.started_s = [nan] * num_requests
        self.first_token_s = [nan] * num_requests
        self.last_token_s = [nan] * num_requests
        self.finished_s = [nan] * num_requests
        self.refused_s = [nan] * num_requests
        self.retry_after_s = [nan] * num_requests
        self.handover_s = [0.0] * num_requests  # see `continued`
        self.max_gap_s = [0.0] * num_requests
        self.num_output_tokens = [0] * num_requests
        self.num_starts = [0] * num_requests
        self.num_cached_tokens = [0] * num_requests
        self.replica = [0] * num_requests
        self.gaps_s = array("d")  # all TBTs, in order of time
        self.gap_owner = array("i") if keep_steps else None  # the request of each gap
        self.steps = Steps() if keep_steps else None
        self.num_steps = 0
        self.busy_s = 0.0  # sum over all stages
        self.bubble_s = 0.0
        self.end_s = 0.0

    def started(self, request_id: int, now_s: float) -> None:
        """The request entered the stages, for the first time or after a preemption."""
        if not self.num_starts[request_id]:
            self.started_s[request_id] = now_s
        self.num_starts[request_id] += 1

    def continued(self, request_id: int, now_s: float) -> None:
        """The stream goes on at a second engine: since its first token it was in no step."""
        self.handover_s[request_id] = now_s - self.first_token_s[request_id]

    def emitted(self, rows: Sequence[OutputRow], now_s: float) -> int:
        """Record one message of the core; returns the number of requests that it ended."""
        last_s, max_gap_s = self.last_token_s, self.max_gap_s
        counts, gap, owners = self.num_output_tokens, self.gaps_s.append, self.gap_owner
        num_ended = 0
        for row in rows:
            request_id = row[0]
            num_tokens = 1 if len(row) == PLAIN_FIELDS else len(row[2])
            if num_tokens:
                if counts[request_id]:
                    waited_s = now_s - last_s[request_id]
                    gap(waited_s)
                    if owners is not None:
                        owners.append(request_id)
                    if waited_s > max_gap_s[request_id]:
                        max_gap_s[request_id] = waited_s
                else:
                    self.first_token_s[request_id] = now_s
                    self.num_cached_tokens[request_id] = row[4]
                last_s[request_id] = now_s
                counts[request_id] += num_tokens
            if len(row) > PLAIN_FIELDS and row[3] is not None:
                self.finished_s[request_id] = now_s
                num_ended += 1
        self.end_s = now_s
        return num_ended

    def refused(self, refusal: Refuse, now_s: float) -> None:
        self.refused_s[refusal.request_id] = now_s
        if refusal.retry_after_s is not None:
            self.retry_after_s[refusal.request_id] = refusal.retry_after_s


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run; times in seconds, rates per second.

    Scheduling delay: until a request's first step, and where another engine continues its stream,
    from its first token until the first step there.
    """

    num_requests: int
    num_completed: int
    num_refused: int
    span_s: float
    qps_offered: float
    qps_completed: float
    output_tokens_per_s: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    tbt_p50: float
    tbt_p90: float
    tbt_p99: float
    tbt_max: float
    max_tbt_p99: float
    scheduling_delay_p50: float
    scheduling_delay_p99: float
    e2e_p50: float
    e2e_p99: float
    normalized_p50: float
    num_preemptions: int
    num_steps: int
    mean_step_s: float
    bubble_share: float
    goodput: float

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def _quantile(values: Floats, q: float) -> float:
    return float(np.quantile(values, q)) if len(values) else math.nan


def _each(objective_s: float | Floats, record: RunRecord) -> Floats:
    return np.broadcast_to(objective_s, len(record.arrival_s))


def summarize(
    record: RunRecord,
    *,
    tbt_objective_s: float | Floats | None = None,
    ttft_objective_s: float | Floats | None = None,
    skip: int = 0,
) -> Summary:
    """Figures over the requests from id `skip` on, which leaves out the ramp-up.

    Objectives are one value, or an array with one per request.
    TBT figures cover all tokens of the run, because gaps are recorded without their request.
    """
    arrival = np.array(record.arrival_s)[skip:]
    first = np.array(record.first_token_s)[skip:]
    finished = np.array(record.finished_s)[skip:]
    started = np.array(record.started_s)[skip:]
    refused = np.array(record.refused_s)[skip:]
    worst = np.array(record.max_gap_s)[skip:]
    outputs = np.array(record.num_output_tokens)[skip:]
    done = ~np.isnan(finished)
    gaps = np.frombuffer(record.gaps_s, np.float64) if len(record.gaps_s) else np.empty(0)
    ttft = (first - arrival)[~np.isnan(first)]
    delay = (started - arrival + np.array(record.handover_s)[skip:])[~np.isnan(started)]
    e2e = (finished - arrival)[done]
    kept = done.copy()
    if tbt_objective_s is not None:
        kept &= worst <= _each(tbt_objective_s, record)[skip:] * (1 + 1e-9)
    if ttft_objective_s is not None:
        limit = _each(ttft_objective_s, record)[skip:]
        kept &= np.nan_to_num(first - arrival, nan=np.inf) <= limit
    begin = float(np.nanmin(arrival)) if len(arrival) else 0.0
    span = max(record.end_s - begin, 1e-12)
    offered = float(np.nanmax(arrival)) - begin if len(arrival) > 1 else 0.0
    starts = np.array(record.num_starts)[skip:]
    tails = np.quantile(gaps, (0.5, 0.9, 0.99)) if len(gaps) else np.full(3, math.nan)
    return Summary(
        num_requests=len(arrival),
        num_completed=int(done.sum()),
        num_refused=int((~np.isnan(refused)).sum()),
        span_s=span,
        qps_offered=(len(arrival) - 1) / offered if offered else math.nan,
        qps_completed=float(done.sum()) / span,
        output_tokens_per_s=float(outputs.sum()) / span,
        ttft_p50=_quantile(ttft, 0.5),
        ttft_p90=_quantile(ttft, 0.9),
        ttft_p99=_quantile(ttft, 0.99),
        tbt_p50=float(tails[0]),
        tbt_p90=float(tails[1]),
        tbt_p99=float(tails[2]),
        tbt_max=float(gaps.max()) if len(gaps) else math.nan,
        max_tbt_p99=_quantile(worst[done], 0.99),
        scheduling_delay_p50=_quantile(delay, 0.5),
        scheduling_delay_p99=_quantile(delay, 0.99),
        e2e_p50=_quantile(e2e, 0.5),
        e2e_p99=_quantile(e2e, 0.99),
        normalized_p50=_quantile(e2e / np.maximum(outputs[done], 1), 0.5),
        num_preemptions=int(np.maximum(starts - 1, 0).sum()),
        num_steps=record.num_steps,
        mean_step_s=record.busy_s / record.num_steps if record.num_steps else math.nan,
        bubble_share=(
            record.bubble_s / (record.busy_s + record.bubble_s) if record.busy_s else 0.0
        ),
        goodput=float(kept.sum()) / span,
    )


def write_requests(record: RunRecord, path: str | Path) -> None:
    """Write a Parquet file with one row per request."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = (
        "arrival_s",
        "started_s",
        "first_token_s",
        "last_token_s",
        "finished_s",
        "refused_s",
        "retry_after_s",
        "max_gap_s",
        "num_output_tokens",
        "num_starts",
        "num_cached_tokens",
        "replica",
    )
    pq.write_table(pa.table({name: getattr(record, name) for name in names}), path)
