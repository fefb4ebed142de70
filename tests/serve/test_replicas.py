"""Replicas of `legato serve`: one that is killed and drained, and two behind one address."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.server_process import ctrl_c

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]


def complete(server: Any) -> httpx.Response:
    body = {"model": server.model, "prompt": [7] * 5, "max_tokens": 8, "temperature": 0}
    body |= {"ignore_eos": True}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


@pytest.mark.long
def test_a_killed_replica_comes_back_on_its_port_and_ctrl_c_drains(
    serve: Callable[..., Any], tiny_model: Callable[..., Path]
) -> None:
    args = {"model": {"path": str(tiny_model("llama"))}, "kv": {"memory_gib": 0.01}}
    with serve(args) as server:
        before = complete(server).json()["choices"]
        (replica,) = server.titled("ray::ServeReplica")
        replica.kill()
        replica.wait(30)
        with httpx.Client(transport=httpx.HTTPTransport(retries=8)) as client:  # 64 s in all
            assert client.get(f"{server.url}/health").status_code == 200
        assert complete(server).json()["choices"] == before
        (successor,) = server.titled("ray::ServeReplica")
        assert successor.pid != replica.pid

        body = {"model": server.model, "prompt": [7] * 5, "max_tokens": 200}
        body |= {"ignore_eos": True, "stream": True}
        with (
            httpx.stream("GET", f"{server.url}/console/feed") as watching,
            httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer,
        ):
            lines = answer.iter_lines()
            next(lines)
            ctrl_c(server.process)
            assert [line for line in lines if line][-1] == "data: [DONE]"
            assert "data: " in watching.read().decode()  # to its end: an open console is let go
        assert server.process.wait(60) == 0
        told = f"process {successor.pid} serves in the place of process {replica.pid}, which had"
        assert told in server.config.with_name("serve.log").read_text()


@pytest.mark.long
def test_two_replicas_answer_behind_one_address(
    serve: Callable[..., Any], tiny_model: Callable[..., Path]
) -> None:
    args = {"model": {"path": str(tiny_model("llama"))}, "kv": {"memory_gib": 0.01}}
    with serve(args, num_replicas=2) as server:
        assert len(server.titled("ray::ServeReplica", "Engine")) == 2
        assert len(server.titled("ray::ServeReplica", "Front")) == 1
        answers = [complete(server).json()["choices"] for _ in range(8)]
        assert answers == answers[:1] * 8
