"""Names of semaphores in shared memory: those of a dead engine go, those in use stay."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from actors.transport import semaphores


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(semaphores, "_FOLDER", tmp_path)
    return tmp_path


def test_only_the_names_of_these_are_taken_away(folder: Path) -> None:
    mine, other, foreign = (folder / n for n in ("sem.hdr7-1", "sem.obj7-2", "sem.mp-x"))
    for path in (mine, other, foreign):
        path.touch()
    semaphores.remove({mine.stat().st_ino, foreign.stat().st_ino})
    assert sorted(p.name for p in folder.iterdir()) == ["sem.mp-x", "sem.obj7-2"]


def test_orphans_of_one_raylet_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("sem.hdr7-1", "sem.obj7-1", "sem.hdr77-1", "sem.hdr7-2")
    for name in names:
        (folder / name).touch()
    in_use = (folder / "sem.hdr7-2").stat().st_ino
    monkeypatch.setattr(semaphores, "mapped_by", lambda pids: {in_use})
    semaphores.remove_orphans(raylet=7)
    assert sorted(p.name for p in folder.iterdir()) == ["sem.hdr7-2", "sem.hdr77-1"]


def test_what_a_process_maps_is_found() -> None:
    lock = multiprocessing.get_context("spawn").Semaphore()  # a named one, its name gone at once
    mapped = semaphores.mapped_by([os.getpid()])
    assert mapped, lock
    assert semaphores.mapped_by([2**30]) == set()
