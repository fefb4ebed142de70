"""Iteration records as a Chrome/Perfetto trace: one track per stage, one slice per micro-batch.

Open the file at ui.perfetto.dev or chrome://tracing; bubbles are the gaps one sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def perfetto(iterations: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """A trace in the JSON object format; times in microseconds from the first iteration."""
    events: list[dict[str, Any]] = []
    origin_s: float | None = None
    num_stages = 0
    for record in iterations:
        if origin_s is None:
            origin_s = record["submitted_s"]
        args = {
            key: record[key]
            for key in ("step", "num_decode_tokens", "num_prefill_tokens", "predicted_s")
        }
        name = f"{record['num_decode_tokens']} decode + {record['num_prefill_tokens']} prefill"
        for stage, (begin_s, end_s) in enumerate(record["stages_s"] or ()):
            num_stages = max(num_stages, stage + 1)
            events.append(
                {
                    "name": name,
                    "cat": "step",
                    "ph": "X",
                    "pid": 1,
                    "tid": stage + 1,
                    "ts": (begin_s - origin_s) * 1e6,
                    "dur": (end_s - begin_s) * 1e6,
                    "args": args,
                }
            )
        done_us = (record["done_s"] - origin_s) * 1e6
        events += [
            {"name": key, "ph": "C", "pid": 1, "ts": done_us, "args": {key: record[key]}}
            for key in ("num_waiting", "num_decoding", "num_prefilling", "num_free_blocks")
        ]
    names = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": n + 1, "args": {"name": f"stage {n}"}}
        for n in range(num_stages)
    ]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}
