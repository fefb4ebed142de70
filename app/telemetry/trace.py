"""Iteration records as a Chrome/Perfetto trace: one track per stage, one slice per micro-batch.

Times of stages on other nodes have been brought to the scheduler's clock, from bounds on their
offset (`StageClocks`): between the tracks of different nodes, waits of some milliseconds are not
exact. Open the file at ui.perfetto.dev or chrome://tracing; bubbles appear as gaps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_ARGS = ("step", "num_decode_tokens", "num_prefill_tokens", "predicted_s")
_COUNTERS = ("num_waiting", "num_decoding", "num_prefilling", "num_free_blocks")


def perfetto(iterations: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """A trace in the JSON object format, with one process per engine.

    iterations: rows of `records.ITERATIONS`. Times are microseconds since the earliest row.
    """
    by_engine: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for record in iterations:
        by_engine[record["engine"]].append(record)
    origin_s = min((r["submitted_s"] for rows in by_engine.values() for r in rows), default=0.0)
    events: list[dict[str, Any]] = []
    for process, (engine, records) in enumerate(sorted(by_engine.items()), 1):
        num_stages = max(len(record["stages_s"] or ()) for record in records)
        events.append(_named("process_name", process, 0, engine or "engine"))
        events += [
            _named("thread_name", process, stage + 1, f"stage {stage}")
            for stage in range(num_stages)
        ]
        for record in records:
            events += _events(record, process, origin_s)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(record: Mapping[str, Any], process: int, origin_s: float) -> Iterator[dict[str, Any]]:
    name = f"{record['num_decode_tokens']} decode + {record['num_prefill_tokens']} prefill"
    args = {key: record[key] for key in _ARGS}
    for stage, (begin_s, end_s) in enumerate(record["stages_s"] or ()):
        yield {
            "name": name,
            "cat": "step",
            "ph": "X",
            "pid": process,
            "tid": stage + 1,
            "ts": (begin_s - origin_s) * 1e6,
            "dur": (end_s - begin_s) * 1e6,
            "args": args,
        }
    done_us = (record["done_s"] - origin_s) * 1e6
    for key in _COUNTERS:
        yield {"name": key, "ph": "C", "pid": process, "ts": done_us, "args": {key: record[key]}}


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
