"""The cluster of `legato serve`, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from app.paths import PACKAGES
from app.ray_environment import ENVIRONMENT

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]

_PROGRAM = """
import os, signal
os.environ.update({environment!r})
from app.cli.local_ray import start_ray
start_ray(2)
import psutil, ray

def of_environment(value):
    remote = ray.remote(runtime_env={{"env_vars": {{"LEGATO_TEST": value}}}})
    return ray.get(remote(lambda: os.environ["LEGATO_TEST"]).remote(), timeout=60)

print(of_environment("40"))
import app
print(ray.get(ray.remote(lambda: __import__("app").__file__).remote()) == app.__file__)
children = psutil.Process().children(recursive=True)
lines = [" ".join(child.cmdline()) for child in children]

signal.signal(signal.SIGINT, signal.SIG_IGN)
agent = next(child for child in children if "RuntimeEnv" in child.name())
os.killpg(0, signal.SIGINT)
print(of_environment("50"))
print(agent.is_running())

[raylet] = [child for child in psutil.Process().children() if child.name() == "raylet"]
[stand_in] = [child for child in raylet.children() if child.name() == "cat"]
raylet.kill()
raylet.wait(30)
stand_in.wait(30)
print(stand_in.is_running())
print(*lines, sep="\\n", flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """By a program in a folder with a package `app`, which is not the one that workers import."""
    folder = tmp_path_factory.mktemp("foreign")
    (folder / "app").mkdir()
    (folder / "app/__init__.py").touch()
    done = subprocess.run(
        [sys.executable, "-P", "-c", _PROGRAM.format(environment=ENVIRONMENT)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(PACKAGES)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_it_works_without_the_daemons_that_nobody_reads(printed: list[str]) -> None:
    answer, is_own, *_ = printed
    assert (answer, is_own) == ("40", "True")
    processes = printed[5:]
    assert any("raylet" in line for line in processes)
    for unread in ("dashboard/dashboard.py", "dashboard/agent.py", "DashboardAgent", "monitor.py"):
        assert not [line for line in processes if unread in line.partition("--")[0]]


def test_ctrl_c_in_a_terminal_ends_none_of_its_processes(printed: list[str]) -> None:
    """It reaches the whole group; streams that are drained need the cluster meanwhile."""
    assert printed[2:4] == ["50", "True"]


def test_what_stands_in_for_an_agent_ends_with_the_raylet(printed: list[str]) -> None:
    assert printed[4] == "False"
