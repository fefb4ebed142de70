"""Every event and plan of a live core, as Parquet: `legato replay` runs them through a fresh core.

Rows are those of `actors.scheduling.event_log`. They are serialised where they happen, because
events refer to live objects, and written by a thread.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

logger = logging.getLogger("legato.events")

SCHEMA = pa.schema(
    [
        ("now_s", pa.float64()),
        ("kind", pa.string()),
        ("event", pa.string()),
        ("instructions", pa.string()),
    ]
)


class EventFile:
    """One Parquet file of rows; a row group every `rows_per_group` rows."""

    def __init__(self, folder: Path, *, rows_per_group: int = 2000) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**6:06d}"
        self.path = folder / f"{name}.parquet"
        self._rows: list[dict[str, Any]] = []
        self._rows_per_group = rows_per_group
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="events")
        self._file = pq.ParquetWriter(self.path, SCHEMA, compression="zstd")

    def write(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        if len(self._rows) >= self._rows_per_group:
            self._flush()

    def _flush(self) -> None:
        rows, self._rows = self._rows, []
        if rows:
            self._thread.submit(self._put, rows).add_done_callback(_complain)

    def _put(self, rows: list[dict[str, Any]]) -> None:
        self._file.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))

    def close(self) -> None:
        """Write what is buffered and finish the file; without it the file has no footer."""
        self._flush()
        self._thread.submit(self._file.close).add_done_callback(_complain)
        self._thread.shutdown(wait=True)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The rows of one file, in order."""
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


def _complain(done: Future[None]) -> None:
    error = done.exception()
    if error is not None:  # a full disk must not stop the tokens
        logger.error("events were not written: %s", error)
