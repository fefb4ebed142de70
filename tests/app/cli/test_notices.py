"""The terminal of a server, whose cluster is in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from app.ray_environment import ENVIRONMENT

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]

_PROGRAM = f"""
import os
os.environ.update({ENVIRONMENT!r})
from app.cli.local_ray import start_ray
start_ray(2)
import ray
from actors.transport.notices import notify

class Actor:
    def tell(self, line):
        notify(line).result()
    def end(self):
        os.kill(os.getpid(), 9)

for name in ("StageActor", "SchedulerActor", "ServeReplica"):
    actor = ray.remote(type(name, (Actor,), dict())).remote()
    ray.get(actor.tell.remote(f"[{{name}}] lost"))
    try:
        ray.get(actor.end.remote())
    except ray.exceptions.ActorDiedError:
        pass
input()  # until the last line has been seen
ray.shutdown()
"""
_TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "


def test_a_log_has_one_plain_line_per_event_and_none_of_rays_paragraphs() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line.rstrip())
            if "died" in line and "ServeReplica" in line:
                break
        rest, _ = process.communicate("\n")
    assert (process.returncode, rest) == (0, "")
    wanted = (
        r"\[StageActor\] lost",
        r"\[SchedulerActor\] lost",
        r"\[ServeReplica\] lost",
        r"process \d+ \(ServeReplica\) died: Ray replaces it",
    )
    assert len(lines) == len(wanted), lines
    for line, pattern in zip(lines, wanted, strict=True):
        assert re.fullmatch(_TIME + pattern, line), lines
