"""Sections run in a process that is replaced when one of them ruins it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from app.bench.gpu.worker import Add, Worker
from app.bench.report import MeasurementError

pytestmark = pytest.mark.heavy  # processes that import torch


def adds_rows(add: Add) -> dict[str, Any]:
    add("checks", {"name": "good"})
    return {"process": os.getpid()}


def raises(add: Add) -> None:
    raise ValueError("the kernel does not compile")


def faults(add: Add) -> None:
    add("checks", {"name": "before the fault"})
    os.kill(os.getpid(), signal.SIGSEGV)


def exits(add: Add) -> None:
    os._exit(3)


def never_ends(add: Add) -> None:
    while True:
        time.sleep(3600)


def is_sound() -> bool:
    return True


def is_ruined() -> bool:
    return False


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker(is_sound)
    yield worker
    worker.close()


def test_one_process_runs_all_that_leave_it_sound(worker: Worker) -> None:
    rows: list[tuple[str, Any]] = []
    first = worker.run(lambda *row: rows.append(row), adds_rows)
    with pytest.raises(MeasurementError, match="ValueError: the kernel does not compile"):
        worker.run(lambda *row: None, raises)
    again = worker.run(lambda *row: rows.append(row), adds_rows)
    assert rows == [("checks", {"name": "good"})] * 2
    assert first == again
    assert first["process"] != os.getpid()


@pytest.mark.parametrize(
    ("work", "how"),
    [
        (faults, "its process was ended by SIGSEGV"),
        pytest.param(exits, "ended with status 3", marks=pytest.mark.long),
    ],
)
def test_a_process_that_dies_is_replaced(worker: Worker, work: Any, how: str) -> None:
    rows: list[tuple[str, Any]] = []
    with pytest.raises(MeasurementError, match=how):
        worker.run(lambda *row: rows.append(row), work)
    assert len(rows) == (work is faults), "what was found before is kept"
    assert worker.run(lambda *row: None, adds_rows)["process"]


def test_a_process_whose_gpu_answers_no_more_is_replaced() -> None:
    worker = Worker(is_ruined)
    try:
        first = worker.run(lambda *row: None, adds_rows)
        with pytest.raises(MeasurementError, match="ValueError"):
            worker.run(lambda *row: None, raises)
        assert worker.run(lambda *row: None, adds_rows) != first
    finally:
        worker.close()


def test_what_never_ends_is_ended() -> None:
    worker = Worker(is_sound, silent_s=0.0)
    try:
        with pytest.raises(MeasurementError, match="no word for 0 s"):
            worker.run(lambda *row: None, never_ends)
    finally:
        worker.close()
