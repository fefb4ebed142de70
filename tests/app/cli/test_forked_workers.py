"""Workers of the tests' cluster are forks, and without the process that forks they start all the
same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import fork_request


@pytest.mark.ray
def test_a_worker_is_a_fork_with_an_identity_of_its_own(ray_cluster: None) -> None:
    import ray

    class Told:
        def origin(self) -> tuple[int, int, str]:
            return os.getppid(), os.getpgid(0), ray.NodeID.from_random().hex()

    workers = [ray.remote(num_cpus=0)(Told).remote() for _ in range(2)]
    try:
        told = ray.get([worker.origin.remote() for worker in workers], timeout=60)
    finally:
        for worker in workers:
            ray.kill(worker)
    (parent,) = {parent for parent, *_ in told}
    assert "tests.forked_workers" in psutil.Process(parent).cmdline()
    assert len({group for _, group, _ in told}) == 2
    assert len({drawn for *_, drawn in told}) == 2, "what they draw at random is the same"


def test_a_command_is_run_where_nobody_forks(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(Path(fork_request.__file__).read_text())
    worker = tmp_path / fork_request.WORKER
    worker.write_text("import sys; print(sys.argv[1:])")
    command = [sys.executable, "-IS", str(python), str(worker), "--a=b"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "['--a=b']\n"
