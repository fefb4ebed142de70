"""Figures of a chaos run."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from app.bench.chaos.requests import ChaosAnswer, Verdict, judge
from app.bench.chaos.run import ChaosRecord, InjectedFault
from app.bench.terminal import table
from app.telemetry.definitions import quantile

_SHOWN_FAILURES = 20


def chaos_figures(
    seen: ChaosRecord, wanted: Sequence[ChaosAnswer], leaks: Sequence[str], left_over: Sequence[str]
) -> dict[str, Any]:
    """pauses_ms: for every fault and every stream open at that time, its longest gap from then to
    the recovery. recovery_s: until a new request was answered. is_clean: nothing was lost, doubled,
    changed, leaked or left over, and every fault was survived."""
    judged = [(a, judge(a, wanted[a.request.number])) for a in seen.answers if not a.is_refused]
    made = [fault for fault in seen.faults if fault.skipped is None]
    skipped = {fault.kind: fault.skipped for fault in seen.faults if fault.skipped is not None}
    wrong = [(answer, verdict) for answer, verdict in judged if not verdict.is_exact]
    found = {
        "num_faults": len(made),
        "num_survived": sum(fault.recovered_s is not None for fault in made),
        "faults": {
            kind: _of_kind(made, kind, seen.answers) for kind in sorted({f.kind for f in made})
        },
        "skipped": skipped,
        "pauses_ms": _spread([p for fault in made for p in pauses_s(fault, seen.answers)], 1000),
        "num_streams": len(judged),
        "streams": dict(Counter(answer.request.kind for answer, _ in judged)),
        "num_refused": len(seen.answers) - len(judged),
        "num_tokens": sum(len(answer.event_times_s) for answer, _ in judged),
        "num_tokens_lost": sum(verdict.num_lost for _, verdict in judged),
        "num_tokens_doubled": sum(verdict.num_doubled for _, verdict in judged),
        "num_streams_changed": sum(verdict.is_changed for _, verdict in judged),
        "failures": [_failure(*pair) for pair in wrong[:_SHOWN_FAILURES]],
        "leaks": list(leaks),
        "left_over": list(left_over),
    }
    all_survived = found["num_survived"] == found["num_faults"]
    return {**found, "is_clean": not (wrong or leaks or left_over) and all_survived}


def _failure(answer: ChaosAnswer, verdict: Verdict) -> dict[str, Any]:
    return {
        "kind": answer.request.kind,
        "number": answer.request.number,
        "status": answer.status,
        "num_events": len(answer.event_times_s),
        "why": verdict.why,
    }


def _of_kind(
    made: Sequence[InjectedFault], kind: str, answers: Sequence[ChaosAnswer]
) -> dict[str, Any]:
    mine = [fault for fault in made if fault.kind == kind]
    took = [f.recovered_s - f.at_s for f in mine if f.recovered_s is not None]
    return {
        "num": len(mine),
        "num_streams_open": sum(len(pauses_s(fault, answers)) for fault in mine),
        "num_survived": len(took),
        "recovery_s": _spread(took),
        "pauses_ms": _spread([p for fault in mine for p in pauses_s(fault, answers)], 1000),
    }


def pauses_s(fault: InjectedFault, answers: Sequence[ChaosAnswer]) -> list[float]:
    """Longest gap of every stream that was open when the fault struck."""
    if fault.recovered_s is None:
        return []
    found = []
    for answer in answers:
        times = answer.event_times_s
        if times and times[0] < fault.at_s < times[-1]:
            pairs = itertools.pairwise(times)
            found.append(max(b - a for a, b in pairs if b >= fault.at_s and a <= fault.recovered_s))
    return found


def _spread(values: Sequence[float], unit: float = 1.0) -> dict[str, float]:
    ordered = sorted(unit * value for value in values)
    return {
        "p50": quantile(ordered, 0.5),
        "p99": quantile(ordered, 0.99),
        "longest": quantile(ordered, 1.0),
    }


def chaos_table(found: Mapping[str, Any]) -> Table:
    columns = ("fault", "survived", "of", "serving again, s", "longest", "pause P50, ms", "longest")
    rows = [
        (
            kind,
            str(row["num_survived"]),
            str(row["num"]),
            f"{row['recovery_s']['p50']:.1f}",
            f"{row['recovery_s']['longest']:.1f}",
            f"{row['pauses_ms']['p50']:.0f}",
            f"{row['pauses_ms']['longest']:.0f}",
        )
        for kind, row in found["faults"].items()
    ]
    return table(f"{found['num_survived']} of {found['num_faults']} faults survived", columns, rows)


def chaos_lines(found: Mapping[str, Any]) -> list[str]:
    pauses = found["pauses_ms"]
    lines = [
        f"{found['num_streams']} streams, {found['num_tokens']} tokens, {found['num_refused']} "
        "refused and asked again",
        f"lost {found['num_tokens_lost']}, doubled {found['num_tokens_doubled']}, streams changed "
        f"{found['num_streams_changed']}",
        f"pauses of the streams: P50 {pauses['p50']:.0f} ms, P99 {pauses['p99']:.0f} ms, longest "
        f"{pauses['longest']:.0f} ms",
        f"leaks: {'; '.join(found['leaks']) or 'none'}",
        f"left over after the end: {'; '.join(found['left_over'][:5]) or 'nothing'}",
    ]
    lines += [f"skipped: {kind}: {why}" for kind, why in found["skipped"].items()]
    return lines
