"""Served with engines for prompts and engines for streams: clients get what colocated engines give,
stop strings and tool calls included, whichever engine dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.fleet_streams import Streams, engines_of, wait_for_engines
from tests.tiny_models import LASTING

pytestmark = [pytest.mark.serve, pytest.mark.long, pytest.mark.timeout(600)]


def test_clients_see_no_difference(
    unfailed: list[dict[str, Any]],
    serve: Callable[..., Any],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    args = {
        "model": {"path": str(tiny_model("llama", **LASTING))},
        "kv": {"memory_gib": 0.01, "block_size": 4},
        "scheduling": {"token_budget": 128},
    }
    assert any(answer["reasons"] == {0: "stop"} for answer in unfailed[-4:])
    shared = {"shared_cache_gib": 0.01, "shared_cache_path": str(tmp_path)}
    divided = {**args, "kv": {**args["kv"], **shared}, "fleet": {"way": "split"}}
    with serve(divided, name="Engine-decode", num_replicas=1) as server:
        wait_for_engines(server, 2)
        for role in ("prefill", "decode"):
            (victim,) = [e for e in engines_of(server) if e["role"] == role]

            def strike(pids: tuple[int, int] = (victim["pid"], victim["replica_pid"])) -> None:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)

            assert asyncio.run(Streams(server.url, server.model).run(strike)) == unfailed, role
            wait_for_engines(server, 2)
            found = httpx.get(f"{server.url}/console/status").json()
            assert role == "decode" or found["num_fetched_blocks"] > 0  # of the engine that lives
        assert found["fleet"]["num_hand_overs"] > 30
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert left == [], "the store ends with its engines"
