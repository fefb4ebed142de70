"""What a replica says as it takes the place of another."""

from __future__ import annotations

import logging
import os
import subprocess

import msgpack
import pytest
from ray.experimental import internal_kv

from actors.transport.node_directory import this_node
from app.server import leave_in_order, tell_succession

pytestmark = pytest.mark.ray


def note(pid: int) -> None:
    packed = msgpack.packb((this_node(), pid))
    internal_kv._internal_kv_put("serving/tests/replica", packed, namespace="legato")


def test_a_replica_says_that_it_serves_in_the_place_of_a_dead_one_alone(
    ray_cluster: None, caplog: pytest.LogCaptureFixture
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    caplog.set_level(logging.WARNING, logger="legato")
    for pid, is_told in ((None, False), (os.getppid(), False), (ended.pid, True)):
        if pid is not None:
            note(pid)
        caplog.clear()
        tell_succession("tests/replica")
        said = f"process {os.getpid()} serves in the place of process {pid}, which had died"
        assert (said in caplog.text) == is_told
        assert bool(caplog.text) == is_told
    leave_in_order("tests/replica")
    caplog.clear()
    tell_succession("tests/replica")
    note(ended.pid)
    leave_in_order("tests/replica")  # another's entry stays
    tell_succession("tests/replica")
    assert caplog.text.count("which had died") == 1
    leave_in_order("tests/replica")
