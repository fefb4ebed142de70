"""What clients may do to a server: others go on, and nothing of it stays."""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.faults import within
from tests.faults.raw_clients import address, connected, head, is_closed, status_of, whole
from tests.faults.streams import act_beside_others, stream_all
from tests.faults.surroundings import (
    MAX_TOKENS,
    Canary,
    completion,
    long_text,
    num_connections,
    pids_of,
    serving_stages,
    until,
)
from tests.serve.server_process import Server

pytestmark = [pytest.mark.serve, pytest.mark.timeout(120)]

# For a client of many threads: httpx may close an idle connection that another thread has just got.
A_CONNECTION_EACH = httpx.Limits(max_connections=None, max_keepalive_connections=0)


def test_row_13_a_hundred_clients_leave_at_random_tokens(server: Server) -> None:
    chance = random.Random(5)

    def leave(after: int) -> None:
        body = completion(server, [7] * 20, 200, stream=True)
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            for _ in zip(range(after), answer.iter_lines(), strict=False):
                pass

    with ThreadPoolExecutor(50) as pool:
        list(pool.map(leave, [chance.randrange(1, 40) for _ in range(100)]))

    def at_rest() -> bool:
        status = httpx.get(f"{server.url}/console/status").json()
        return bool(status["num_free_blocks"] == status["num_blocks"])

    until(at_rest, "blocks are freed", within.CLIENTS_GONE_S)


@pytest.mark.parametrize("kind", ["streams", pytest.param("whole", marks=pytest.mark.long), "feed"])
def test_row_15_clients_that_stop_reading_are_dropped(
    server: Server, canary: Canary, kind: str
) -> None:
    """Gap 13: on every route; streams beside them go on, and none of it is kept."""
    # More than the system's own buffers take: of what lies there the server knows nothing.
    body = completion(server, [5] * 20, 200, n=64, logprobs=20)
    sent = {
        "streams": whole("/v1/completions", {**body, "stream": True}),
        "whole": whole("/tokenize", long_text(server.model)),
        "feed": head("/console/feed", method="GET"),
    }[kind]
    num_clients = 100 if kind == "feed" else 1
    with connected(server, sent, num_clients) as clients:
        until(lambda: num_connections(server) >= num_clients, "connected")
        # The feed writes as long as there are iterations, the others until they are done.
        deadline_s = time.monotonic() + 60
        while not all(map(is_closed, clients)) and time.monotonic() < deadline_s:
            streams = stream_all(server, canary.prompts, MAX_TOKENS)
            assert [s.text for s in streams] == canary.texts()
            if kind == "feed":
                break
        if kind != "feed":
            until(lambda: all(map(is_closed, clients)), "dropped", within.READERS_DROPPED_S)


def test_gap_13_what_is_left_of_a_body_is_not_waited_for(server: Server) -> None:
    """Answered before its body has come: the connection does not stay open for the rest."""
    sent = head("/live", "content-length: 1000000", method="GET")
    with connected(server, sent) as (client,):
        assert status_of(client) == 200
        until(lambda: client.recv(1 << 16) == b"", "closed", 10.0)


def test_a_replica_without_files_answers_every_connection(server: Server) -> None:
    """Served, or told to come again: none is closed without a word."""
    (pid,) = pids_of(server, "ray::ServeReplica")
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    files = [int(name) for name in os.listdir(f"/proc/{pid}/fd")]
    highest = max(files)
    num_gaps = highest + 1 - len(files)  # numbers that connections of earlier tests have left

    def ask(client: httpx.Client) -> httpx.Response:
        body = completion(server, [5] * 20, 20)
        return client.post(f"{server.url}/v1/completions", json=body)

    with httpx.Client(timeout=60, limits=A_CONNECTION_EACH) as client:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + 1, before[1]))
        try:
            with connected(server, b"", 40 + num_gaps), ThreadPoolExecutor(20) as pool:
                answers = list(pool.map(ask, [client] * 100))
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        assert ask(client).status_code == 200
    assert {answer.status_code for answer in answers} <= {200, 503}
    refused = [answer for answer in answers if answer.status_code == 503]
    assert refused
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)


def test_row_18_the_longest_prompts_arrive_amid_decodes(server: Server, canary: Canary) -> None:
    """Health is green, and answers stay exact; their pace is the simulator's and the bench's."""

    def arrive() -> None:
        for _ in range(8):
            body = completion(server, [9] * 250, 2)
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).is_success
            assert httpx.get(f"{server.url}/health").status_code == 200

    streams = stream_all(server, canary.prompts, MAX_TOKENS, arrive)
    assert [s.text for s in streams] == canary.texts()


def test_row_20_settings_change_under_load(server: Server, canary: Canary) -> None:
    took_s = []

    def change() -> None:
        for policy in ("orca", "vllm", "sarathi"):
            begin_s = time.monotonic()
            changes = {"policy": policy}
            answer = httpx.post(f"{server.url}/console/settings", json=changes, timeout=30)
            assert answer.status_code == 200, answer.text
            took_s.append(time.monotonic() - begin_s)

    streams = stream_all(server, canary.prompts, MAX_TOKENS, change)
    assert [s.text for s in streams] == canary.texts()
    assert max(took_s) <= within.SETTINGS_S


CHUNK = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"


ENDLESS: list[tuple[str, str, bytes, int]] = [
    ("/v1/completions", "content-length: 1000000000", b"[" * 100_000, 413),
    ("/console/settings", "content-length: 1000000000", b"[" * 100_000, 413),
    ("/v1/completions", "transfer-encoding: chunked", CHUNK * 3, 413),
    ("/console/settings", "transfer-encoding: chunked", CHUNK * 3, 413),
    ("/v1/completions", "x-large: " + "x" * (1 << 20), b"", 431),
    ("/v1/completions", "content-length: 100", b"{", 408),
    ("/console/settings", "content-length: 100", b"{", 408),
]


def test_row_21_bodies_and_heads_without_end(server: Server) -> None:
    def send(case: tuple[str, str, bytes, int]) -> float:
        route, line, rest, status = case
        begin_s = time.monotonic()
        client = socket.create_connection(address(server), 30)
        with client, suppress(ConnectionError):  # one that does not wait for the answer
            client.sendall(head(route, line) + rest)
        with socket.create_connection(address(server), 30) as client:
            with suppress(ConnectionError):
                client.sendall(head(route, line) + rest)
            assert status_of(client) == status, (route, line[:40])
        return time.monotonic() - begin_s

    with ThreadPoolExecutor(len(ENDLESS)) as pool:
        assert max(pool.map(send, ENDLESS)) <= within.BODY_REFUSED_S


DEEP = b"[" * 100_000
BAD: list[bytes] = [
    b'{"model": "m", "messages": ' + DEEP,
    b'{"model": "m", "prompt": NaN}',
    b'{"model": "m", "prompt": "\xff\xfe"}',
    b'{"model": "m", "prompt": "x", "max_tokens": -1}',
    b'{"model": "m", "prompt": "x", "n": 1000000000}',
    b'{"model": "m", "prompt": "x", "seed": 1180591620717411303424}',
    b'{"tbt_ms": 1180591620717411303424}',
    b'{"slo.tbt_ms": Infinity}',
    b'{"max_running_per_tenant": 0}',
    b'{"queue_timeout_s": -1}',
    b'{"policy_options": {"x": ' + b"9" * 4000 + b"}}",
    b"[]",
]


ROUTES = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/console/settings")


def test_row_22_bad_bodies_are_refused_and_no_stream_waits(server: Server) -> None:
    def ask_all() -> None:
        for route, body in itertools.product(ROUTES, BAD):
            begin_s = time.monotonic()
            answer = httpx.post(
                f"{server.url}{route}",
                content=body.replace(b'"m"', json.dumps(server.model).encode()),
                headers={"content-type": "application/json"},
                timeout=30,
            )
            assert answer.status_code == 400, (route, body[:60], answer.text)
            assert answer.json()["error"]["message"]
            assert time.monotonic() - begin_s <= within.BAD_REQUEST_S

    act_beside_others(server, ask_all)


def test_row_23_grammars_that_explode(server: Server) -> None:
    """Refused in time; a good grammar beside them is served."""
    pattern = {"type": "string", "pattern": "(a|b){1,50}"}
    hostile = [
        {
            "guided_json": {
                "type": "object",
                "properties": {f"p{k}{i}": pattern for k in range(1500)},
            }
        }
        for i in range(2)
    ]
    good = completion(server, [5] * 9, 8, guided_regex="[ab]{4,8}")

    def ask(more: dict[str, Any]) -> tuple[int, float]:
        begin_s = time.monotonic()
        body = {**completion(server, [5] * 9, 8), **more}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        return answer.status_code, time.monotonic() - begin_s

    def ask_all() -> None:
        with ThreadPoolExecutor(4) as pool:
            bad = pool.map(ask, hostile)
            assert ask(good)[0] in (200, 503)  # the checker may be busy, and says so
            for status, took_s in bad:
                assert status in (400, 503)
                assert took_s <= 10 * within.GRAMMAR_REFUSED_S

    act_beside_others(server, ask_all)
    until(lambda: ask(good)[0] == 200, "the checker serves again", 30.0)


LARGE: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "logprobs": (
        "/v1/completions",
        lambda m: {"model": m, "prompt": [5] * 20, "n": 64, "max_tokens": 140, "logprobs": 20},
    ),
    "chat logprobs": (
        "/v1/chat/completions",
        lambda m: {
            "model": m, "messages": [{"role": "user", "content": "hi"}], "n": 64,
            "max_tokens": 140, "logprobs": True, "top_logprobs": 20,
        },
    ),
    "echo": (
        "/v1/completions",
        lambda m: {
            "model": m, "prompt": [[5 + i] * 200 for i in range(40)], "max_tokens": 1,
            "echo": True, "logprobs": 20,
        },
    ),
    "detokenize": ("/detokenize", lambda m: {"model": m, "tokens": [97] * 250_000}),
    "tokenize": ("/tokenize", long_text),
}  # fmt: skip


# The answers of both completions are made and sent alike.
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.long) if n == "chat logprobs" else n for n in LARGE],
)
def test_gap_10_large_answers_stop_no_stream(server: Server, name: str) -> None:
    route, body_of = LARGE[name]
    body = {**body_of(server.model), **({"ignore_eos": True} if "v1" in route else {})}
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(httpx.post(f"{server.url}{route}", json=body, timeout=100))

    act_beside_others(server, ask)
    for answer in answers:
        assert answer.status_code == 200, answer.text[:300]
        assert len(answer.content) > 200_000
        json.loads(answer.content)  # not beside the probe: it would wait for the parser's lock


def test_gap_10_larger_answers_are_refused(server: Server) -> None:
    body = completion(server, [5] * 20, 200, n=64, logprobs=20)
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "logprobs"


def test_gap_14_a_foreign_page_changes_nothing(server: Server) -> None:
    foreign = {"host": "evil.example:8000", "origin": "http://evil.example:8000"}
    for headers in (foreign, {"host": "evil.example"}, {"origin": "http://evil.example"}):
        for route in ("/console/settings", "/v1/completions"):
            answer = httpx.post(f"{server.url}{route}", json={"policy": "orca"}, headers=headers)
            assert answer.status_code == 403
    plain = {"content-type": "text/plain"}  # what a page may send without being asked
    answer = httpx.post(f"{server.url}/console/settings", content=b'{"policy":"x"}', headers=plain)
    assert answer.status_code == 415
    assert httpx.get(f"{server.url}/console/status").json()["policy"] == "sarathi"


def test_row_17_overload_is_refused_with_a_time_to_come_back(
    server: Server, canary: Canary
) -> None:
    """Ten times what runs and queues: accepted ones get every token, others are refused at once."""
    settings, num_queued = f"{server.url}/console/settings", 8
    limits = {"max_requests": 4, "max_queued_requests": num_queued}
    assert httpx.post(settings, json=limits).status_code == 200
    body, wanted = completion(server, canary.prompts[0], 40), canary.texts(40)[0]

    def ask(client: httpx.Client) -> tuple[httpx.Response, float]:
        begin_s = time.monotonic()
        answer = client.post(f"{server.url}/v1/completions", json=body)
        return answer, time.monotonic() - begin_s

    try:
        with (
            httpx.Client(timeout=60, limits=A_CONNECTION_EACH) as client,
            ThreadPoolExecutor(120) as pool,
        ):
            answers = list(pool.map(ask, [client] * 120))
    finally:
        limits = {"max_requests": 64, "max_queued_requests": None}
        assert httpx.post(settings, json=limits).status_code == 200
    taken = [answer for answer, _ in answers if answer.status_code == 200]
    refused = [(answer, wait_s) for answer, wait_s in answers if answer.status_code != 200]
    assert len(taken) >= num_queued  # all may come before the first of them starts
    assert {answer.json()["choices"][0]["text"] for answer in taken} == {wanted}
    assert refused
    for answer, wait_s in refused:
        assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(answer.headers["retry-after"]) >= 1
        assert wait_s <= within.OVERLOAD_REFUSED_S


def test_row_8_and_14_callers_cancel_in_every_state(server: Server) -> None:
    """In the queue, in their prefill and their decode: a hundred, more than run at once."""
    with connected(server, whole("/v1/completions", completion(server, [5] * 250, 5)), 100):
        pass  # all leave at once
    assert len(serving_stages(server)) == 2
