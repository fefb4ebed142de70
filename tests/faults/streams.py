"""Streams over HTTP whose tokens are timed, and what happens meanwhile."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.faults import within
from tests.faults.surroundings import completion
from tests.serve.server_process import Server


@dataclass
class Streamed:
    text: str = ""
    ends: list[str] = field(default_factory=list)  # the last lines
    longest_gap_s: float = 0.0


def stream_all(
    server: Server,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    strike: Callable[[], Any] = lambda: None,
    **more: Any,
) -> list[Streamed]:
    """All at once; `strike` falls when every one of them has had a token. What fails raises as it
    failed, not as those that waited for it."""
    barrier = threading.Barrier(len(prompts), action=strike)

    def read(prompt: Sequence[int]) -> Streamed:
        try:
            return read_through(prompt)
        except BaseException:
            barrier.abort()
            raise

    def read_through(prompt: Sequence[int]) -> Streamed:
        found, last_s = Streamed(), 0.0
        body = completion(server, prompt, max_tokens, stream=True, **more)
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if not line.startswith("data: "):
                    continue
                now_s = time.monotonic()
                found.longest_gap_s = max(found.longest_gap_s, now_s - last_s if last_s else 0.0)
                last_s = now_s
                found.ends = [*found.ends[-1:], line]
                if line != "data: [DONE]":
                    event = json.loads(line[6:])
                    assert "error" not in event, line
                    is_first = not found.text
                    found.text += event["choices"][0]["text"]
                    if is_first and found.text:
                        barrier.wait(30)
        return found

    with ThreadPoolExecutor(len(prompts)) as pool:
        reading = [pool.submit(read, prompt) for prompt in prompts]
    faults = [fault for stream in reading if (fault := stream.exception())]
    for fault in sorted(faults, key=lambda f: isinstance(f, threading.BrokenBarrierError)):
        raise fault
    return [stream.result() for stream in reading]


def act_beside_others(server: Server, act: Callable[[], None], num_tries: int = 3) -> None:
    """Ask /live all the while. A server that stops its event loop does so at every try; a machine
    that does other work stops a whole process, but not whenever it is looked at."""
    longest_waits_s = []
    for _ in range(num_tries):
        begin_s = time.monotonic()
        longest_waits_s.append(_longest_wait_s(server, act))
        if longest_waits_s[-1] <= max(within.LOOP_LAG_S, (time.monotonic() - begin_s) / 4):
            return
    raise AssertionError(f"others waited {longest_waits_s} s")


def _longest_wait_s(server: Server, act: Callable[[], None]) -> float:
    waits_s: list[float] = []
    probing, over = threading.Event(), threading.Event()

    def probe() -> None:
        with httpx.Client() as client:
            while not over.is_set():
                begin_s = time.monotonic()
                assert client.get(f"{server.url}/live", timeout=60).status_code == 200
                waits_s.append(time.monotonic() - begin_s)
                probing.set()
                over.wait(0.005)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(probe)
        try:
            # What is short would otherwise be over before the first question is asked.
            assert probing.wait(60)
            act()
        finally:
            over.set()
            running.result(60)
    return max(waits_s)
