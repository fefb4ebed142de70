"""Logs of requests, iterations and missed gaps as Parquet, written by a thread.

Files: `requests-<start>-<n>.parquet`, `iterations-...` and `gaps-...` in one folder; each is
complete when it appears (written beside and renamed). A file ends by size or age.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from actors.scheduling.request import Objective
from app.api.events import RequestInfo, RequestOutcome, RequestTiming
from app.telemetry.causes import Explanation, Gap

_logger = logging.getLogger("legato.telemetry")

_STAGE = pa.list_(pa.list_(pa.float64()))
ITERATIONS = pa.schema(
    [
        ("engine", pa.string()),  # "": the only one
        ("step", pa.int64()),
        ("submitted_s", pa.float64()),
        ("done_s", pa.float64()),
        ("predicted_s", pa.float64()),
        ("num_decode_tokens", pa.int32()),
        ("num_prefill_tokens", pa.int32()),
        ("num_requests", pa.int32()),
        ("stages_s", _STAGE),
        ("num_decoding", pa.int32()),
        ("num_prefilling", pa.int32()),
        ("num_waiting", pa.int32()),
        ("num_free_blocks", pa.int32()),
        ("num_preemptions", pa.int64()),
        ("num_recoveries", pa.int64()),
        ("token_budget", pa.int32()),
        ("holds_starts", pa.bool_()),
    ]
)
REQUESTS = pa.schema(
    [
        ("request_id", pa.string()),
        ("endpoint", pa.string()),
        ("tenant", pa.string()),
        ("start_s", pa.float64()),
        ("queued_s", pa.float64()),
        ("ttft_s", pa.float64()),
        ("max_tbt_s", pa.float64()),
        ("e2e_s", pa.float64()),
        ("num_prompt_tokens", pa.int32()),
        ("num_output_tokens", pa.int32()),
        ("num_cached_tokens", pa.int32()),
        ("status", pa.int32()),
        ("reason", pa.string()),
        ("ttft_objective_s", pa.float64()),
        ("tbt_objective_s", pa.float64()),
        ("kept_objectives", pa.bool_()),
    ]
)
MISSED_GAPS = pa.schema(
    [
        ("request_id", pa.string()),
        ("continuation", pa.int32()),
        ("engine", pa.string()),
        ("from_s", pa.float64()),
        ("to_s", pa.float64()),
        ("objective_s", pa.float64()),
        ("num_tokens", pa.int32()),
        ("num_steps", pa.int32()),
        ("cause", pa.string()),
        ("step", pa.int64()),
    ]
)
_ROWS_PER_BATCH = 500
_OLDEST_ROW_S = 60.0  # buffered; a killed process loses what is younger
_SCHEMAS = {"requests": REQUESTS, "iterations": ITERATIONS, "gaps": MISSED_GAPS}


def read_records(file: Path, kind: str) -> list[dict[str, Any]]:
    """Rows of one log file. kind: "requests", "iterations" or "gaps". A column that the file lacks
    is None, a missing engine ""."""
    rows: list[dict[str, Any]] = pq.read_table(file, schema=_SCHEMAS[kind]).to_pylist()
    for row in rows:
        if row.get("engine", "") is None:
            row["engine"] = ""
    return rows


def replica_folder(directory: Path) -> Path:
    """A folder below a `telemetry.directory` for this replica alone: another, in a container or on
    a node that shares the disk, may have the same process id."""
    return directory / f"replica-{os.getpid()}-{secrets.token_hex(3)}"


class RecordLog:
    """settings: resolved and JSON-able; written beside the data, to make a log self-contained.
    clock: of the age of buffered rows."""

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, Any],
        *,
        rows_per_file: int = 20_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._rows_per_file = rows_per_file
        self._clock = clock
        self._oldest_s: float | None = None  # when the first row after a flush came
        self._started = _unique_time()
        self._rows: dict[str, list[Mapping[str, Any]]] = {kind: [] for kind in _SCHEMAS}
        # Used by the writer only; packed rows take a tenth of the memory of objects.
        self._batches: dict[str, list[pa.RecordBatch]] = {kind: [] for kind in _SCHEMAS}
        self._num_files = 0
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="records")
        text = json.dumps(settings, indent=2, default=str)
        (directory / f"settings-{self._started}.json").write_text(text + "\n")

    def request(
        self,
        request: RequestInfo,
        outcome: RequestOutcome,
        timing: RequestTiming,
        objective: Objective,
        start_s: float,
        end_s: float,
    ) -> None:
        """Log a finished request and its objective."""
        row = {
            "request_id": request.request_id,
            "endpoint": request.endpoint,
            "tenant": request.tenant,
            "start_s": start_s,
            "queued_s": outcome.queued_s,
            "ttft_s": timing.ttft_s,
            "max_tbt_s": timing.max_tbt_s,
            "e2e_s": end_s - start_s,
            "num_prompt_tokens": request.num_prompt_tokens,
            "num_output_tokens": outcome.num_completion_tokens,
            "num_cached_tokens": outcome.num_cached_tokens,
            "status": outcome.status,
            "reason": outcome.reason,
            "ttft_objective_s": objective.ttft_s,
            "tbt_objective_s": objective.tbt_s,
            "kept_objectives": timing.kept,
        }
        self._add("requests", row)

    def iteration(self, row: Mapping[str, Any]) -> None:
        self._add("iterations", row)

    def gap(
        self,
        request_id: str,
        continuation: int,
        gap: Gap,
        explanation: Explanation,
        engine_id: str = "",
    ) -> None:
        """Log a gap between tokens that missed its objective."""
        row = {"request_id": request_id, "continuation": continuation, "engine": engine_id}
        self._add("gaps", {**row, **gap._asdict(), **explanation._asdict()})

    def _add(self, kind: str, row: Mapping[str, Any]) -> None:
        rows = self._rows[kind]
        rows.append(row)
        now_s = self._clock()
        if self._oldest_s is None:
            self._oldest_s = now_s
        if now_s - self._oldest_s > _OLDEST_ROW_S:
            self.flush()
        elif len(rows) >= min(_ROWS_PER_BATCH, self._rows_per_file):
            self._hand_on(kind)

    def _hand_on(self, kind: str, ends_file: bool = False) -> None:
        rows, self._rows[kind] = self._rows[kind], []
        self._writer.submit(self._pack, kind, rows, ends_file).add_done_callback(_complain)

    def _pack(self, kind: str, rows: list[Mapping[str, Any]], ends_file: bool) -> None:
        """In the writer's thread: pack the rows, and write the file once it is full."""
        batches = self._batches[kind]
        if rows:
            packed = pa.RecordBatch.from_pylist([dict(r) for r in rows], schema=_SCHEMAS[kind])
            batches.append(packed)
        num_rows = sum(batch.num_rows for batch in batches)
        if not num_rows or (num_rows < self._rows_per_file and not ends_file):
            return
        self._batches[kind] = []
        self._num_files += 1
        path = self._directory / f"{kind}-{self._started}-{self._num_files:06d}.parquet"
        _write(path, pa.Table.from_batches(batches))

    def flush(self) -> None:
        """Write buffered rows, in the writer's thread."""
        self._oldest_s = None
        for kind in self._rows:
            self._hand_on(kind, ends_file=True)

    def close(self) -> None:
        """Flush and wait for the writer."""
        self.flush()
        self._writer.shutdown(wait=True)


def _write(path: Path, table: pa.Table) -> None:
    partial = path.with_suffix(".partial")
    try:
        pq.write_table(table, partial, compression="zstd")
        partial.rename(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)  # it would keep a full disk full
        raise


def _unique_time() -> str:
    """Now, as part of the names of one log's files."""
    now_s, now_ns = divmod(time.time_ns(), 10**9)
    second = time.strftime("%Y%m%d-%H%M%S", time.localtime(now_s))
    return f"{second}-{now_ns:09d}-{secrets.token_hex(3)}"


def _complain(done: Future[None]) -> None:
    error = done.exception()
    if error is not None:  # a full disk must not stop the tokens
        _logger.error("records were not written: %s", error)
