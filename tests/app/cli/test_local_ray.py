"""The cluster of `legato serve`, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.paths import PACKAGES
from app.ray_environment import ENVIRONMENT

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]

_PROGRAM = """
import os
os.environ.update({environment!r})
from app.cli.local_ray import start_ray
start_ray(2)
import psutil, ray
with_environment = ray.remote(runtime_env={{"env_vars": {{"LEGATO_TEST": "40"}}}})
print(ray.get(with_environment(lambda: int(os.environ["LEGATO_TEST"]) + 2).remote()))
import app
print(ray.get(ray.remote(lambda: __import__("app").__file__).remote()) == app.__file__)
for child in psutil.Process().children(recursive=True):
    print(" ".join(child.cmdline()))
ray.shutdown()
"""

_KILL = """
[raylet] = [process for process in psutil.Process().children() if process.name() == "raylet"]
[stand_in] = [process for process in raylet.children() if process.name() == "cat"]
raylet.kill()
raylet.wait(30)
stand_in.wait(30)
os._exit(0)
"""


def test_it_works_without_the_daemons_that_nobody_reads(tmp_path: Path) -> None:
    """And in a folder with a package `app`, which is not the one that workers import."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app/__init__.py").touch()
    program = _PROGRAM.format(environment=ENVIRONMENT)
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(PACKAGES)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer, is_own, *processes = done.stdout.splitlines()
    assert (answer, is_own) == ("42", "True")
    assert any("raylet" in line for line in processes)
    for unread in ("dashboard/dashboard.py", "dashboard/agent.py", "DashboardAgent", "monitor.py"):
        assert not [line for line in processes if unread in line.partition("--")[0]]


def test_what_stands_in_for_an_agent_ends_with_the_raylet() -> None:
    program = _PROGRAM.format(environment=ENVIRONMENT).replace("ray.shutdown()", _KILL)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


_CTRL_C = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
agent = next(p for p in psutil.Process().children(recursive=True) if "RuntimeEnv" in p.name())
os.killpg(0, signal.SIGINT)
later = ray.remote(runtime_env={"env_vars": {"LEGATO_TEST": "50"}})
print(ray.get(later(lambda: os.environ["LEGATO_TEST"]).remote(), timeout=60))
print(agent.is_running())
ray.shutdown()
"""


def test_ctrl_c_in_a_terminal_ends_none_of_its_processes() -> None:
    """It reaches the whole group; streams that are drained need the cluster meanwhile."""
    program = _PROGRAM.format(environment=ENVIRONMENT).replace("ray.shutdown()", _CTRL_C)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=110, check=False, start_new_session=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["50", "True"]
