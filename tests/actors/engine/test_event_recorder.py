"""A log of events stays readable, whatever is killed and however long it is."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from actors.engine.event_recorder import EventLog, read_events


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {"now_s": float(n), "kind": "Tick", "event": f"{n:0100d}", "instructions": "[]"}
        for n in range(count)
    ]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("events-*.parquet"))


def test_a_log_of_many_files_is_read_as_one(tmp_path: Path) -> None:
    log = EventLog(tmp_path, rows_per_file=20, rows_per_group=10)
    for row in rows(75):
        log.write(row)
    log.close()
    assert [len(read_events(file)) for file in files(tmp_path)] == [75, 55, 35, 15]
    assert read_events(files(tmp_path)[0]) == rows(75)
    assert not list(tmp_path.glob("*.partial"))


def test_a_killed_process_loses_the_last_file_alone(tmp_path: Path) -> None:
    log = EventLog(tmp_path, rows_per_file=20, rows_per_group=10)
    for row in rows(75):
        log.write(row)
    log._thread.shutdown(wait=True)  # and no more: nothing is closed
    assert read_events(files(tmp_path)[0]) == rows(60)


def test_recording_ends_at_its_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(tmp_path, max_bytes=4000, rows_per_file=20, rows_per_group=10)
    for row in rows(1000):
        log.write(row)
    log.close()
    recorded = read_events(files(tmp_path)[0])
    assert 20 <= len(recorded) < 500
    assert recorded == rows(len(recorded))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 10_000
    assert caplog.text.count("4000 bytes") == 1


def test_a_disk_that_takes_no_more_ends_the_recording(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = EventLog(tmp_path / "log", rows_per_file=20, rows_per_group=10)
    shutil.rmtree(tmp_path / "log")
    for row in rows(75):
        log.write(row)
    log.close()
    assert "recording of events ends" in caplog.text
