"""Workers are forks with identities of their own; without the process that forks they start all the
same."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from app.cli import fork_request
from app.paths import PACKAGES as ROOT


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
    assert "app.cli.forked_workers" in psutil.Process(parent).cmdline()
    assert len({group for _, group, _ in told}) == 2
    assert len({drawn for *_, drawn in told}) == 2, "what they draw at random is the same"


def test_a_command_is_run_where_nobody_forks(tmp_path: Path) -> None:
    worker = tmp_path / "default_worker.py"
    worker.write_text("import sys; print(sys.argv[1:])")
    asking = [sys.executable, "-IS", fork_request.__file__, str(tmp_path / "forks")]
    command = [*asking, fork_request.SETUP, str(worker), "--a=b", "--language=PYTHON"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "['--a=b']\n"


def test_a_worker_with_an_environment_of_its_own_is_prepared_first(tmp_path: Path) -> None:
    setup = tmp_path / fork_request.SETUP
    setup.write_text("import sys; print(sys.argv[1:])")
    asking = [sys.executable, "-IS", fork_request.__file__, str(tmp_path / "forks")]
    command = [*asking, str(setup), "default_worker.py", f"{fork_request.ENVIRONMENT}={{}}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "default_worker.py" in done.stdout


@pytest.mark.heavy
def test_it_imports_no_package_of_the_working_folder(tmp_path: Path) -> None:
    """Many have one named `app`; what `legato` itself was imported from is taken."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app/__init__.py").write_text("raise SystemExit('the user has an app too')")
    program = (
        "from app.cli.forked_workers import ForkServer\n"
        "process = ForkServer()._process\nprocess.stdin.close()\nraise SystemExit(process.wait())"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.heavy
def test_it_ends_with_the_command_that_made_it() -> None:
    program = (
        "import os\nfrom app.cli.forked_workers import ForkServer\n"
        "print(ForkServer()._process.pid, flush=True)\nos._exit(0)"
    )
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(made.stdout)).wait(timeout=60)
