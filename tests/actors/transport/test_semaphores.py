"""Names of semaphores in shared memory: those of a dead engine go, those in use stay."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import secrets
import subprocess
from pathlib import Path

import psutil
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


def test_orphans_go_and_what_is_in_use_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    raylet, other = os.getpid(), os.getppid()
    left = [f"sem.hdr{raylet}-1", f"sem.obj{raylet}-1", f"sem.hdr{ended.pid}-17953663164"]
    in_use = f"sem.hdr{raylet}-2"
    kept = [in_use, f"sem.hdr{other}-1", f"sem.mp{ended.pid}-1", f"sem.hdr{ended.pid}"]
    for name in (*left, *kept):
        (folder / name).touch()
    inode = (folder / in_use).stat().st_ino
    monkeypatch.setattr(semaphores, "mapped_by", lambda pids: {inode})
    semaphores.remove_orphans(raylet)
    assert sorted(os.listdir(folder)) == sorted(kept)


def test_a_server_that_ends_touches_no_other_servers_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / f"sem.hdr{os.getpid()}-1").touch()
    semaphores.remove_orphans()
    assert os.listdir(folder)
    monkeypatch.setattr(semaphores, "_FOLDER", folder / "none")
    semaphores.remove_orphans()


def test_what_a_process_maps_is_found() -> None:
    lock = multiprocessing.get_context("spawn").Semaphore()  # a named one, its name gone at once
    mapped = semaphores.mapped_by([os.getpid()])
    assert mapped, lock
    assert semaphores.mapped_by([2**30]) == set()


@pytest.mark.ray
def test_a_worker_that_is_a_fork_finds_the_names_of_its_raylet(ray_cluster: None) -> None:
    """As under `legato serve`: those that another worker has open stay, those of dead ones go."""
    import ray

    class Worker:
        def map(self, path: str) -> None:
            with open(path, "r+b") as opened:
                self.mapped = mmap.mmap(opened.fileno(), 32)

        def unmap(self) -> None:
            self.mapped.close()

        def remove_orphans(self) -> None:
            semaphores.remove_orphans(semaphores.own_raylet())

    (raylet,) = [p for p in psutil.Process().children(recursive=True) if p.name() == "raylet"]
    name = Path(f"/dev/shm/sem.hdr{raylet.pid}-{secrets.randbits(60)}")
    holder, remover = [ray.remote(num_cpus=0)(Worker).remote() for _ in range(2)]
    try:
        name.write_bytes(bytes(32))
        ray.get(holder.map.remote(str(name)), timeout=60)
        ray.get(remover.remove_orphans.remote(), timeout=60)
        assert name.exists()
        ray.get(holder.unmap.remote())
        ray.get(remover.remove_orphans.remote())
        assert not name.exists()
    finally:
        name.unlink(missing_ok=True)
        for worker in (holder, remover):
            ray.kill(worker)
