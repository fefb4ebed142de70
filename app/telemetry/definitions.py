"""Every metric of Legato, defined once: name, unit, formula.

The live engine, the benchmarks and the simulator share these definitions, so a figure has the same
meaning wherever it is printed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One definition. scope: "request", "token", "step" or "engine"."""

    name: str
    unit: str
    scope: str
    formula: str


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("ttft", "s", "request", "first token - arrival"),
        Metric(
            "tbt",
            "s",
            "token",
            "token - previous token of the request, once for tokens that come together",
        ),
        Metric("scheduling_delay", "s", "request", "start of the first step it is in - arrival"),
        Metric("e2e_time", "s", "request", "last token - arrival"),
        Metric("e2e_time_normalized", "s/token", "request", "e2e_time / output tokens"),
        Metric("execution_time", "s", "request", "last token - start of its first step"),
        Metric("prefill_time", "s", "request", "first token - start of its first step"),
        Metric("decode_time", "s", "request", "last token - first token"),
        Metric("preempted_time", "s", "request", "time between a preemption and the next start"),
        Metric("num_preemptions", "1", "request", "times it lost its KV blocks"),
        Metric("num_prompt_tokens", "token", "request", "length of the prompt"),
        Metric("num_output_tokens", "token", "request", "tokens generated"),
        Metric("num_cached_tokens", "token", "request", "prompt tokens found in the prefix cache"),
        Metric("max_tbt", "s", "request", "longest tbt of the request"),
        Metric("step_time", "s", "step", "busy time of the slowest stage"),
        Metric("step_tokens", "token", "step", "tokens computed, prefill and decode"),
        Metric("step_prefill_tokens", "token", "step", "tokens in slices of more than one token"),
        Metric("step_decode_tokens", "token", "step", "slices of one token"),
        Metric("step_requests", "request", "step", "slices"),
        Metric("step_gap", "s", "step", "start of a step - end of the one before, first stage"),
        Metric("bubble_time", "s", "step", "time a stage waits while other stages are busy"),
        Metric("goodput", "request/s", "engine", "completed requests that kept their objectives"),
        Metric("throughput", "token/s", "engine", "output tokens / observed span"),
        Metric("num_waiting", "request", "engine", "requests not yet started"),
        Metric("num_running", "request", "engine", "requests holding KV blocks"),
        Metric("kv_usage", "1", "engine", "KV blocks in use / all KV blocks"),
    )
}


def quantile(ordered: Sequence[float], q: float) -> float:
    """Quantile of ascending values, linear between neighbors; nan of nothing.

    >>> quantile([1.0, 2.0, 3.0, 4.0], 0.5)
    2.5
    """
    if not ordered:
        return math.nan
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def kept_objectives(
    ttft_s: float,
    max_tbt_s: float,
    *,
    ttft_objective_s: float | None,
    tbt_objective_s: float | None,
) -> bool:
    """Whether a finished request kept its objectives and counts towards goodput."""
    if ttft_objective_s is not None and not ttft_s <= ttft_objective_s:
        return False
    return tbt_objective_s is None or not max_tbt_s > tbt_objective_s
