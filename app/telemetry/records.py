"""Request and iteration logs as Parquet, written by a thread, rotated by size.

Files: `requests-<start>-<n>.parquet` and `iterations-<start>-<n>.parquet` in one folder; each is
complete when it appears (written beside and renamed).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_logger = logging.getLogger("legato.telemetry")

_STAGE = pa.list_(pa.list_(pa.float64()))
ITERATIONS = pa.schema(
    [
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
    ]
)


class RecordLog:
    """settings (resolved, JSON-able) are written beside the data: a log explains itself."""

    def __init__(
        self, directory: Path, settings: Mapping[str, Any], *, rows_per_file: int = 20_000
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._rows_per_file = rows_per_file
        self._started = time.strftime("%Y%m%d-%H%M%S")
        self._rows: dict[str, list[Mapping[str, Any]]] = {"requests": [], "iterations": []}
        self._num_files = 0
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="records")
        text = json.dumps(settings, indent=2, default=str)
        (directory / f"settings-{self._started}.json").write_text(text + "\n")

    def request(self, row: Mapping[str, Any]) -> None:
        self._add("requests", row)

    def iteration(self, row: Mapping[str, Any]) -> None:
        self._add("iterations", row)

    def _add(self, kind: str, row: Mapping[str, Any]) -> None:
        rows = self._rows[kind]
        rows.append(row)
        if len(rows) >= self._rows_per_file:
            self._rotate(kind)

    def _rotate(self, kind: str) -> None:
        rows, self._rows[kind] = self._rows[kind], []
        if not rows:
            return
        self._num_files += 1
        path = self._directory / f"{kind}-{self._started}-{self._num_files:04d}.parquet"
        schema = REQUESTS if kind == "requests" else ITERATIONS
        self._writer.submit(_write, path, rows, schema).add_done_callback(_complain)

    def flush(self) -> None:
        """Write what is buffered, in the writer's thread."""
        for kind in self._rows:
            self._rotate(kind)

    def close(self) -> None:
        """Flush and wait for the writer."""
        self.flush()
        self._writer.shutdown(wait=True)


def _write(path: Path, rows: list[Mapping[str, Any]], schema: pa.Schema) -> None:
    table = pa.Table.from_pylist([dict(row) for row in rows], schema=schema)
    partial = path.with_suffix(".partial")
    pq.write_table(table, partial, compression="zstd")
    partial.rename(path)


def _complain(done: Future[None]) -> None:
    error = done.exception()
    if error is not None:  # a full disk must not stop the tokens
        _logger.error("records were not written: %s", error)
