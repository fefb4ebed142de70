"""A machine whose shared memory is full: no request hangs, and once it has room it serves."""

from __future__ import annotations

import random
import time
from pathlib import Path

import httpx
import pytest

from app.bench.chaos.faults import FAULTS, strike
from app.bench.chaos.own_server import SERVING, OwnServer, has_corners, own_server
from tests.faults import within
from tests.faults.surroundings import until

pytestmark = [pytest.mark.serve, pytest.mark.long, pytest.mark.timeout(240)]


def serving(server: OwnServer) -> dict[str, int]:
    return {kind: len(server.pids(kind)) for kind in SERVING}


def test_row_12_a_stage_is_killed_in_full_shared_memory(tmp_path: Path) -> None:
    """It cannot be replaced there: requests are told so, with a time to come back."""
    if not has_corners():
        pytest.skip("this system lets no user have a shared memory of its own")
    config = Path("configs/serve/demo.yaml")
    with own_server(config, {"engine": {"step_deadline_s": 5.0}}, tmp_path / "log") as server:
        body = {"model": server.model, "prompt": [5] * 20, "max_tokens": 12, "temperature": 0}

        def ask() -> httpx.Response:
            return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)

        wanted = ask().json()["choices"]
        before = serving(server)
        _, lift = strike(FAULTS["stage killed in full shared memory"], server, random.Random(0))
        try:
            begin_s = time.monotonic()
            answer = ask()
            assert time.monotonic() - begin_s <= within.FULL_REFUSED_S
            if answer.status_code == 200:  # Ray found room, in files: then it must be right
                assert answer.json()["choices"] == wanted
            else:
                assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
        finally:
            lift()
        until(lambda: ask().status_code == 200, "it serves again", 90.0)
        assert ask().json()["choices"] == wanted
        until(lambda: serving(server) == before, "the same processes", 30.0)
