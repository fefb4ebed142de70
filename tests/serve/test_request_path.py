"""How many files a request passes: counted by tracing one through all processes of a server.

Both counts include every module of ours of which a function runs, in the replica, the scheduler and
the stage. What runs beside the request (health checks, the command line) is left out.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx
import psutil
import pytest

from tests.serve.server_process import running

pytestmark = [pytest.mark.serve, pytest.mark.timeout(300)]

TRACER = Path(__file__).with_name("path_tracer")
# Six of them plan to the running streams' slack. Six make drafts, from what was served before too,
# and compare them with the draws. Two hold the step under construction: its calls and its reads.
MOST_FILES, MOST_FILES_BACK = 57, 12
DEADLINE_S = 60.0
BESIDE = (
    "app/cli/",
    "app/settings/",
    "app/api/endpoints/probes.py",
    "app/server.py",
    "app/telemetry/loop_lag.py",
    "app/telemetry/iterations.py",  # records of steps, ten times a second for all streams
    "actors/engine/iteration_records.py",
    "app/engine_client/iteration_feed.py",
    "app/engine_client/delivery_times.py",  # once for 32 deliveries to all streams
)
BANNER = "show_banner"  # the command line resolves settings for it once the server answers
QUEUED = "plain_output"  # of a token that came before its reader waited for one again
# A token's way back ends with the write to its connection; what the next step needs, and what is
# counted in batches afterwards, is not on it.
NOT_THE_WAY_BACK = {
    "AdaptiveBudget.delivery_took",  # of 32 deliveries at a time
    "Core._learn",
    "Core._plan",
    "EngineLoop._execute",
    "Questions.answer",  # what the replica asks now and then
    "IterationFeed.publish",
    "IterationRecords.note",
    "LiveEngine.on_records",
    "Outcomes._slow_path",  # this and the next once per block, not per token
    "RunningRequests.complete_block",
    "RunningRequests.free_tail",  # memory of rejected drafts, for the next step
}

Row = tuple[str, str, list[str]]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Path]]:
    """(client of a server that notes what it runs, the folder it notes it in). Connections stay
    open: what accepts one is not on a request's way."""
    folder = tmp_path_factory.mktemp("trace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEGATO_TRACE", str(folder))
        args = {"model": {"path": "configs/models/demo"}, "kv": {"memory_gib": 0.05}}
        folder_of_server = tmp_path_factory.mktemp("serve")
        with (
            running(folder_of_server, args, python_path=[TRACER]) as server,
            httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client,
        ):
            _finish_start(client)
            yield client, folder


def _finish_start(client: httpx.Client) -> None:
    """Until the processes for templates and grammars, which start beside the first requests, have
    answered; the grammar with an error, so that the scheduler has seen none."""
    body: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "A letter?"}],
        "response_format": {"type": "regex", "pattern": "[a-"},
    }
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "response_format", answer.text


def _pids(folder: Path, suffix: str) -> set[int]:
    """The processes that have written such a file and still run."""
    return {pid for f in folder.glob(f"*.{suffix}") if _runs(pid := int(f.stem))}


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _until_all(folder: Path, of: str, have: str) -> None:
    """Until each process with a file of the first kind has one of the second."""
    deadline_s = time.monotonic() + DEADLINE_S
    while late := _pids(folder, of) - _pids(folder, have):
        assert time.monotonic() < deadline_s, f"no .{have} of {late}"
        time.sleep(0.005)


def _trace(folder: Path, work: Callable[[], object]) -> list[Row]:
    for old in (*folder.glob("*.json"), *folder.glob("*.on")):
        old.unlink()
    (folder / "on").touch()
    _until_all(folder, "known", "on")
    work()
    (folder / "on").unlink()
    _until_all(folder, "on", "json")
    return [row for file in folder.glob("*.json") for row in json.loads(file.read_text())]


def _stream(client: httpx.Client, max_tokens: int) -> Iterator[str]:
    """The events of one streamed completion; the stream ends with the iterator."""
    body = {
        "model": "demo",
        "prompt": "def read_lines(path):",
        "max_tokens": max_tokens,
        "stream": True,
        "ignore_eos": True,
        "seed": 0,
    }
    with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        yield from filter(None, answer.iter_lines())


def _files(rows: list[Row]) -> set[str]:
    on_its_way = (row for row in rows if not row[0].startswith(BESIDE) and BANNER not in row[2])
    return {file for file, name, _ in on_its_way if name != QUEUED}


def test_a_streamed_completion_passes_few_files(traced: tuple[httpx.Client, Path]) -> None:
    client, folder = traced
    assert list(_stream(client, 8))  # what runs once per process has run
    traces = [_trace(folder, lambda: list(_stream(client, 24))) for _ in range(3)]
    files = set[str].intersection(*map(_files, traces))  # without what runs now and then
    assert "app/api/endpoints/completions.py" in files
    assert "actors/scheduling/core.py" in files
    assert "kernels/cpu/stack.py" in files
    assert len(files) <= MOST_FILES, "\n".join(sorted(files))


def test_a_steady_token_comes_back_through_fewer(traced: tuple[httpx.Client, Path]) -> None:
    """From the scheduler's socket, where the stage's answer arrives, to the client's."""
    client, folder = traced
    events, enough = SimpleQueue[str](), threading.Event()

    def receive() -> None:
        for event in _stream(client, 4000):
            events.put(event)
            if enough.is_set():
                return

    def receive_more() -> None:
        while not events.empty():
            events.get()
        for _ in range(100):
            assert events.get(timeout=DEADLINE_S) != "data: [DONE]"

    stream = threading.Thread(target=receive)
    stream.start()
    for _ in range(4):
        events.get(timeout=DEADLINE_S)
    rows = _trace(folder, receive_more)
    enough.set()
    stream.join()
    back = [
        row
        for row in rows
        if "FrameProtocol.data_received" in {row[1], *row[2]}
        and not NOT_THE_WAY_BACK & {row[1], *row[2]}
    ]
    files = _files(back)
    assert {"actors/engine/loop.py", "app/api/sse.py", "app/api/http/connections.py"} <= files
    assert len(files) <= MOST_FILES_BACK, "\n".join(sorted(files))
