"""How a server ends: in its own time with Ctrl-C, at once with SIGKILL, and with nothing left."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.faults import within
from tests.faults.streams import stream_all
from tests.faults.surroundings import (
    MAX_TOKENS,
    Canary,
    Surroundings,
    completion,
    look,
    semaphores_of,
    until,
)
from tests.serve.server_process import Server, ctrl_c, running

pytestmark = [pytest.mark.serve, pytest.mark.long, pytest.mark.timeout(240)]
NUM_STREAMS = 64
SERVE_GIVES_UP_S = 30.0  # what `serve.shutdown` waits, whatever was promised


def all_gone(server: Server, before: Surroundings) -> None:
    """No process, no port, no semaphore of this server is left."""
    host, port = "127.0.0.1", int(server.url.rpartition(":")[2])
    until(lambda: not any(map(psutil.pid_exists, before.pids)), "processes", 30.0)
    with socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections linger
        own.bind((host, port))


def read_slowly(server: Server, ends: list[bytes], started: threading.Barrier) -> None:
    """A stream of more megabytes than the system's buffers take, read so that it lasts longer than
    Serve's own patience."""
    body = completion(server, [5] * 20, 200, n=NUM_STREAMS, stream=True, logprobs=8)
    content = json.dumps(body).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(60)
        client.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
            b"\r\ncontent-length: %d\r\n\r\n" % len(content) + content
        )
        last = client.recv(1000)
        started.wait(60)
        until_s = time.monotonic() + SERVE_GIVES_UP_S + 3.0
        while part := client.recv(2000):
            last = last[-1000:] + part
            if time.monotonic() < until_s:
                time.sleep(0.3)  # a slow reader, not a wait for anything
        ends.append(last)


def test_gap_6_ctrl_c_waits_for_streams_as_long_as_promised(
    settings: dict[str, Any], canary: Canary, tmp_path: Path
) -> None:
    """Sixty-four continuations whose reader takes longer than thirty seconds all end; nothing of
    the server is left behind then."""
    ends: list[bytes] = []
    started = threading.Barrier(2)
    with running(tmp_path, settings) as server:
        canary.check(server)
        before = look(server)
        reader = threading.Thread(target=read_slowly, args=(server, ends, started))
        reader.start()
        started.wait(60)
        begin_s = time.monotonic()
        ctrl_c(server.process)
        assert server.process.wait(120) == 0
        assert time.monotonic() - begin_s > SERVE_GIVES_UP_S
        reader.join(10)
    assert b"data: [DONE]" in ends[0]
    all_gone(server, before)
    assert semaphores_of(before.pids) == []


def test_sigterm_to_the_whole_group_drains(
    settings: dict[str, Any], canary: Canary, tmp_path: Path
) -> None:
    """As `timeout` sends it, and a supervisor that does not know better."""
    with running(tmp_path, settings) as server:
        canary.check(server)
        before = look(server)
        streams = stream_all(
            server, canary.prompts, MAX_TOKENS,
            lambda: os.killpg(server.process.pid, signal.SIGTERM),
        )  # fmt: skip
        assert server.process.wait(60) == 0
        log = (tmp_path / "serve.log").read_text()
    assert [stream.text for stream in streams] == canary.texts()
    assert "lost" not in log
    assert "Ray" not in log.partition("draining")[2]
    all_gone(server, before)


def test_the_command_is_killed_and_the_next_finds_nothing_of_it(
    settings: dict[str, Any], canary: Canary, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with running(first, settings) as server:
        before = look(server)
        server.process.kill()
        server.process.wait()
        until(
            lambda: not any(map(psutil.pid_exists, before.pids)),
            "all processes end with the command",
            within.COMMAND_KILLED_S,
        )
    with running(second, settings) as server:
        canary.check(server)
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert semaphores_of(before.pids) == []


def test_the_command_ends_with_its_raylet(
    settings: dict[str, Any], canary: Canary, tmp_path: Path
) -> None:
    """A supervisor then starts it again; by itself nothing would ever answer."""
    with running(tmp_path, settings) as server:
        canary.check(server)
        before = look(server)
        found = psutil.Process(server.process.pid).children()
        [raylet] = [process for process in found if process.name() == "raylet"]
        raylet.kill()
        assert server.process.wait(within.COMMAND_KILLED_S) == 1
        assert "raylet has ended" in (tmp_path / "serve.log").read_text()
    all_gone(server, before)


def test_a_batch_that_runs_keeps_no_server_and_leaves_no_file(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Ctrl-C waits for streams, not for the thousands of tokens that a batch has still to draw."""
    folder = tmp_path / "batches"
    url = "/v1/completions"
    with running(tmp_path, {**settings, "batches": {"directory": str(folder)}}) as server:
        body = {"model": server.model, "prompt": "a", "ignore_eos": True}
        lines = [
            json.dumps({"custom_id": str(n), "method": "POST", "url": url, "body": one})
            for n in range(2000)
            for one in [{**body, "max_tokens": 400 if n else 1}]
        ]
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
        until(lambda: _num_completed(client, batch.id) > 0, "answers of the batch", 60.0)
        before = look(server)
        begin_s = time.monotonic()
        ctrl_c(server.process)
        assert server.process.wait(60) == 0
        assert time.monotonic() - begin_s < within.SERVER_WITH_BATCH_ENDS_S
    all_gone(server, before)
    left = {path.name for path in folder.rglob("*") if path.is_file()}
    assert left == {".legato-batches"}, "more than the mark that the folder is a server's own"


def _num_completed(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    return 0 if counts is None else counts.completed
