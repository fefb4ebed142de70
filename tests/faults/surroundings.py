"""What a server holds of its machine, and that a fault leaves it as it was."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from app.text.processor import TextProcessor
from tests.faults.within import SETTLED_S, STANDBY_READY_S
from tests.live.reference import expected, make_prompts
from tests.serve.server_process import Server
from tests.tiny_models import SLOW

LENGTHS = (3, 17, 40, 60, 5, 81, 22, 9)
MAX_TOKENS = 150
_KINDS = ("ray::ServeReplica", "ray::StageActor", "ray::SchedulerActor", "app.text.grammar_worker",
          "app.text.template_worker", "gcs_server", "raylet",
          "ray::RuntimeEnvAgent", "ray::ServeController", "haproxy")  # fmt: skip
_IDLE = ("num_waiting", "num_decoding", "num_prefilling", "num_finishing", "num_in_flight")
_MEMORY = 1.10  # of what was held before


@dataclass(frozen=True)
class Surroundings:
    """num_bytes: resident, of all processes. listening: (address, port) of every open port. The
    standby apart, which comes and goes as the engine is busy or idle. is_single: there is at most
    one."""

    kinds: Counter[str]
    pids: frozenset[int]
    listening: frozenset[tuple[str, int]]
    num_bytes: int
    is_single: bool


def processes(server: Server) -> list[psutil.Process]:
    """The command's own, and all below it."""
    command = psutil.Process(server.process.pid)
    return [command, *command.children(recursive=True)]


def kind_of(process: psutil.Process) -> str | None:
    """Which of a server's processes it is; None for one of Ray's spare workers."""
    with suppress(psutil.Error):
        line = " ".join(process.cmdline())
        if "default_worker" not in line:  # one that is about to be
            return next((kind for kind in _KINDS if kind in line), None)
    return None


def pids_of(server: Server, kind: str) -> list[int]:
    return [process.pid for process in processes(server) if kind_of(process) == kind]


def serving_stages(server: Server) -> list[int]:
    """Process ids of the stages that compute, first stage first: without the standby."""
    status = httpx.get(f"{server.url}/console/status", timeout=SETTLED_S).json()
    return [pid for ranks in status["stage_pids"] for pid in ranks]


def prepared(server: Server) -> list[int]:
    """The standby's process ids, once it is ready."""
    status = f"{server.url}/console/status"
    is_ready = lambda: httpx.get(status, timeout=SETTLED_S).json()["standby"] == "ready"  # noqa: E731
    until(is_ready, "a standby", STANDBY_READY_S)
    return standby_stages(server)


def standby_stages(server: Server) -> list[int]:
    serving = serving_stages(server)
    return [pid for pid in pids_of(server, "ray::StageActor") if pid not in serving]


def look(server: Server) -> Surroundings:
    kinds: Counter[str] = Counter()
    listening: set[tuple[str, int]] = set()
    pids, num_bytes, num_standby, serving = set(), 0, 0, serving_stages(server)
    for process in processes(server):
        with suppress(psutil.Error):
            pids.add(process.pid)
            kind = kind_of(process)
            if kind == "ray::StageActor" and process.pid not in serving:
                num_standby += 1
                continue
            num_bytes += process.memory_info().rss
            if kind is None:
                continue  # Ray keeps a spare worker for as long as it likes
            kinds[kind] += 1
            for found in process.net_connections(kind="tcp"):
                if found.status == psutil.CONN_LISTEN:
                    listening.add((found.laddr.ip, found.laddr.port))
    is_single = num_standby <= len(serving)
    return Surroundings(kinds, frozenset(pids), frozenset(listening), num_bytes, is_single)


def after_each(server: Server, before: Surroundings, canary: Canary) -> None:
    """What must hold after every fault, whatever it was."""
    canary.check(server)
    status = until(lambda: _at_rest(server), "the engine comes to rest")
    assert status["num_free_blocks"] == status["num_blocks"], "KV blocks are lost"
    until(lambda: not num_connections(server), "no connections")
    own = {address for address in before.listening if address[1] == _port(server)}

    def unsettled() -> list[str]:
        after = look(server)
        settled = {
            f"the same processes: {before.kinds}": after.kinds == before.kinds,
            "one standby": after.is_single,
            "its port": own == {a for a in after.listening if a[1] == _port(server)},
            "no more ports": len(after.listening) <= len(before.listening),
            "memory within 10 %": after.num_bytes <= _MEMORY * before.num_bytes,
            "shared memory": not semaphores_of(before.pids - after.pids),
        }
        return [what for what, holds in settled.items() if not holds]

    deadline_s = time.monotonic() + SETTLED_S
    while left := unsettled():
        assert time.monotonic() < deadline_s, f"not within {SETTLED_S:g} s: {', '.join(left)}"
        time.sleep(0.05)  # polling, bounded


def long_text(model: str) -> dict[str, Any]:
    """A body for `/tokenize` whose answer is the largest that the tests ask for."""
    return {"model": model, "prompt": "ab " * 300_000, "return_token_strs": True}


def answer_largest(server: Server) -> None:
    """What the allocator keeps of it, 160 MB, is held from then on: no later answer adds to it."""
    answer = httpx.post(f"{server.url}/tokenize", json=long_text(server.model), timeout=60)
    assert answer.status_code == 200


def _at_rest(server: Server) -> Any:
    answer = httpx.get(f"{server.url}/console/status", timeout=SETTLED_S)
    status = answer.json()
    return status if status.get("ready") and not any(status[key] for key in _IDLE) else None


def num_connections(server: Server) -> int:
    """Open ones of clients, those among them that the client has left."""
    port, count = _port(server), 0
    for process in processes(server):
        with suppress(psutil.Error):
            for found in process.net_connections(kind="tcp"):
                count += found.laddr.port == port and found.status != psutil.CONN_LISTEN
    return count


def semaphores_of(pids: frozenset[int]) -> list[str]:
    """What ended processes have left in shared memory."""
    names = re.compile(r"sem\.(?:hdr|obj)(\d+)-")
    ended = {pid for pid in pids if not psutil.pid_exists(pid)}
    found = [(names.match(name), name) for name in os.listdir("/dev/shm")]
    return [name for match, name in found if match and int(match[1]) in ended]


def _port(server: Server) -> int:
    return int(server.url.rpartition(":")[2])


def until(condition: Callable[[], Any], what: str, within_s: float = SETTLED_S) -> Any:
    """Poll until it is true; its value."""
    deadline_s = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {what}"
        time.sleep(0.05)
    return found


class Canary:
    """One plain request whose answer is known from transformers."""

    def __init__(self, model: Path) -> None:
        self._text = TextProcessor(model)
        self._answers = expected("llama", LENGTHS, MAX_TOKENS, **SLOW)
        self.prompts: Sequence[tuple[int, ...]] = make_prompts(LENGTHS)

    def texts(self, max_tokens: int = MAX_TOKENS) -> list[str]:
        """What unfailed streams of `prompts` are made of."""
        return [
            self.text_of(prompt, tokens[:max_tokens])
            for prompt, tokens in zip(self.prompts, self._answers, strict=True)
        ]

    def text_of(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        detokenizer = self._text.detokenizer(prompt)
        return detokenizer.push(tokens) + detokenizer.flush()

    def check(self, server: Server) -> None:
        body = completion(server, self.prompts[0], 12)
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
        assert answer.status_code == 200, answer.text
        tokens = self._answers[0][:12]
        assert answer.json()["choices"][0]["text"] == self.text_of(self.prompts[0], tokens)

    def close(self) -> None:
        self._text.close()


def completion(
    server: Server, prompt: Sequence[int], max_tokens: int, **more: Any
) -> dict[str, Any]:
    """A greedy request's body."""
    body = {"model": server.model, "prompt": list(prompt), "max_tokens": max_tokens}
    return {**body, "temperature": 0, "ignore_eos": True, **more}
