"""Files of a log: when they end, what they are named, and a disk that takes none."""

from __future__ import annotations

import logging
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from app.telemetry.causes import Cause, Explanation, Gap
from app.telemetry.records import RecordLog, read_records, replica_folder

STEP: dict[str, Any] = {"engine": "", "step": 1, "submitted_s": 1.0, "done_s": 2.0}


def lengths(folder: Path, kind: str) -> list[int]:
    return [len(read_records(file, kind)) for file in sorted(folder.glob(f"{kind}-*.parquet"))]


def test_a_file_ends_when_its_oldest_row_is_a_minute_old(tmp_path: Path) -> None:
    # Of a gap, seven steps and a gap; files end at 60.5 and 121.5.
    times_s = iter((0.0, 10.0, 60.0, 60.5, 61.0, 120.0, 121.5, 122.0, 123.0))
    log = RecordLog(tmp_path, {}, clock=lambda: next(times_s))
    gap = Gap(1.0, 2.0, 0.5, 1)
    log.gap("r1", 0, gap, Explanation(Cause.PREFILL, 1))
    for _ in range(7):
        log.iteration(STEP)
    log.gap("r2", 0, gap, Explanation(Cause.PREFILL, 1))
    log.close()
    assert lengths(tmp_path, "iterations") == [3, 3, 1]
    assert lengths(tmp_path, "gaps") == [1, 1]


def test_logs_that_begin_together_in_a_folder_keep_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "strftime", lambda *given: "20260101-000000")
    monkeypatch.setattr(time, "time_ns", lambda: 10**18)
    for log in [RecordLog(tmp_path, {}) for _ in range(3)]:
        log.iteration(STEP)
        log.close()
    assert lengths(tmp_path, "iterations") == [1, 1, 1]
    assert len(list(tmp_path.glob("settings-*.json"))) == 3
    assert replica_folder(tmp_path) != replica_folder(tmp_path)


def test_a_write_that_fails_leaves_no_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = RecordLog(tmp_path, {})
    (settings,) = tmp_path.glob("settings-*.json")
    log.iteration(STEP)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with caplog.at_level(logging.ERROR):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # as on a full disk
        try:
            log.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "records were not written" in caplog.text
    assert list(tmp_path.iterdir()) == [settings]


def test_a_file_that_cannot_get_its_name_is_removed(tmp_path: Path) -> None:
    log = RecordLog(tmp_path, {})
    (settings,) = tmp_path.glob("settings-*.json")
    started = settings.stem.removeprefix("settings-")
    taken = tmp_path / f"iterations-{started}-000001.parquet"
    (taken / "full").mkdir(parents=True)
    log.iteration(STEP)
    log.close()
    assert sorted(tmp_path.iterdir()) == [taken, settings]
