"""Threads that pass tokens on ask for short time slices."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from actors.transport.time_slices import SHORTEST_NS, shorten_time_slices, time_slice_ns

IN_A_PROCESS = f"""
import os, threading
from concurrent.futures import ThreadPoolExecutor
from actors.transport.time_slices import shorten_time_slices, time_slice_ns

usual = time_slice_ns()
with ThreadPoolExecutor(1) as before, ThreadPoolExecutor(1) as after:
    before.submit(threading.get_native_id).result()
    shorten_time_slices()
    assert time_slice_ns() == before.submit(time_slice_ns).result() == {SHORTEST_NS}
    assert after.submit(time_slice_ns).result() == usual
assert os.nice(0) == {os.nice(0)}
"""


@pytest.mark.skipif(not time_slice_ns(), reason="this system does not tell time slices")
def test_threads_have_short_slices_but_later_ones_do_not() -> None:
    """In a process of its own, because its threads keep them."""
    subprocess.run([sys.executable, "-c", IN_A_PROCESS], check=True, timeout=60)


def test_an_unknown_machine_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert time_slice_ns() == 0
    shorten_time_slices()
