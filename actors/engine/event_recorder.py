"""Every event and plan of a live core, as Parquet: `legato replay` runs them through a fresh core.

Rows are those of `actors.scheduling.event_log`. They are serialized at once, because events refer
to live objects, and written by a thread.
"""

from __future__ import annotations

import itertools
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

logger = logging.getLogger("legato.events")

_DIGITS = 4  # of a file's number
SCHEMA = pa.schema(
    [
        ("now_s", pa.float64()),
        ("kind", pa.string()),
        ("event", pa.string()),
        ("instructions", pa.string()),
    ]
)


class EventLog:
    """Rows in files `events-<start>-<n>.parquet`, each complete when it appears, so a
    killed process loses only the last one.

    A replay needs all events from the first, so nothing is deleted: at `max_bytes`, or when the
    disk is full, recording ends, and the written part stays readable.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int = 1 << 30,
        rows_per_file: int = 50_000,
        rows_per_group: int = 2000,
    ) -> None:
        """Raises OSError where nothing can be written."""
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**6:06d}"
        self._stem = folder / name
        self._max_bytes = max_bytes
        self._rows_per_file = rows_per_file
        self._rows_per_group = rows_per_group
        self._rows: list[dict[str, Any]] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="events")
        self._has_ended = False
        # Used by the thread only:
        self._num_files = self._num_rows = self._num_bytes = 0
        self._file = self._open()

    def write(self, row: dict[str, Any]) -> None:
        if self._has_ended:
            return
        self._rows.append(row)
        if len(self._rows) >= self._rows_per_group:
            self._flush()

    def _flush(self) -> None:
        rows, self._rows = self._rows, []
        if rows:
            self._thread.submit(self._put, rows)

    def close(self) -> None:
        """Write what is buffered and finish the file."""
        self._flush()
        self._thread.submit(self._finish)
        self._thread.shutdown(wait=True)

    # ---- in the thread -------------------------------------------------------------------

    def _open(self) -> pq.ParquetWriter:
        self._num_files += 1
        self._num_rows = 0
        self._path = self._stem.with_name(
            f"{self._stem.name}-{self._num_files:0{_DIGITS}d}.parquet"
        )
        self._partial = self._path.with_suffix(".partial")
        return pq.ParquetWriter(self._partial, SCHEMA, compression="zstd")

    def _put(self, rows: list[dict[str, Any]]) -> None:
        if self._has_ended:
            return
        try:
            self._file.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
            self._num_rows += len(rows)
            if self._num_bytes + self._partial.stat().st_size >= self._max_bytes:
                self._finish()
                logger.error("the event log has reached %d bytes: recording ends", self._max_bytes)
            elif self._num_rows >= self._rows_per_file:
                self._complete()
                self._file = self._open()
        except (OSError, pa.ArrowException) as error:  # a full disk must not stop the tokens
            logger.error("recording of events ends: %s", error)
            self._finish()

    def _complete(self) -> None:
        self._file.close()
        self._partial.rename(self._path)
        self._num_bytes += self._path.stat().st_size

    def _finish(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            try:
                self._complete()
            except (OSError, pa.ArrowException) as error:
                logger.error("the last file of events is lost: %s", error)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The rows of one file, and of those that continue it, in order."""
    rows: list[dict[str, Any]] = []
    for file in continued(path):
        rows += pq.read_table(file).to_pylist()
    return rows


def continued(path: Path) -> list[Path]:
    """The file, followed by the later files of the same log."""
    found, (name, _, number) = [path], path.stem.rpartition("-")
    if number.isdigit() and len(number) == _DIGITS:
        for following in itertools.count(int(number) + 1):
            file = path.with_name(f"{name}-{following:0{_DIGITS}d}.parquet")
            if not file.exists():
                break
            found.append(file)
    return found


def open_log(folder: str | None, max_bytes: int) -> EventLog | None:
    """The log in this folder; None without a folder, or (with an error logged) if it cannot be
    written, since serving does not depend on it."""
    if folder is None:
        return None
    try:
        return EventLog(Path(folder), max_bytes=max_bytes)
    except OSError as error:
        logger.error("events are not recorded: %s", error)
        return None
