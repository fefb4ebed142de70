"""A served fleet: clients of one address notice neither death nor leaving of an engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from app.cli.main import app
from tests.standstill import stand_still
from tests.tiny_models import SLOW

pytestmark = [pytest.mark.serve, pytest.mark.timeout(280)]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"town": {"enum": ["Oslo", "Rome"]}},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}


def bodies(model: str) -> list[tuple[str, dict[str, Any]]]:
    """32 streams of every kind."""
    made: list[tuple[str, dict[str, Any]]] = []
    for number in range(32):
        body: dict[str, Any] = {"model": model, "stream": True, "max_tokens": 150}
        body |= {"stream_options": {"include_usage": True}, "temperature": 0}
        kind = number % 8
        if kind < 5:
            path, body["prompt"] = (
                "completions",
                [(7 * number + i) % 250 for i in range(5 + number)],
            )
            body["ignore_eos"] = True
        else:
            path = "chat/completions"
            body["messages"] = [{"role": "user", "content": f"Grüße, {number} 世界"}]
        if kind == 1:
            body |= {"temperature": 1.0, "seed": number, "n": 3}
        elif kind == 2:
            body |= {"logprobs": 3}
        elif kind == 3:
            body |= {"temperature": 0.9, "seed": number, "top_k": 50}
        elif kind == 5:
            body |= {"ignore_eos": True, "logprobs": True, "top_logprobs": 2}
        elif kind == 6:
            body |= {"tools": [WEATHER], "tool_choice": "required"}
        elif kind == 7:
            pattern = {"type": "regex", "pattern": "(ä|世|x){40,60}"}
            body |= {"response_format": pattern, "temperature": 1.0, "seed": number}
        made.append((path, body))
    return made


def gathered(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client has at the end, however many tokens each event had. Ids and times are the
    request's own."""
    whole: dict[str, Any] = {"text": {}, "logprobs": {}, "calls": {}, "reasons": {}}
    for event in events:
        for choice in event["choices"]:
            index, delta = choice["index"], choice.get("delta") or {"content": choice.get("text")}
            whole["text"][index] = whole["text"].get(index, "") + (delta.get("content") or "")
            for call in delta.get("tool_calls") or ():
                arguments = call["function"].get("arguments") or ""
                whole["calls"][index] = whole["calls"].get(index, "") + arguments
            for name, entries in (choice.get("logprobs") or {}).items():
                if isinstance(entries, list):
                    whole["logprobs"].setdefault(f"{index} {name}", []).extend(entries)
            if choice.get("finish_reason"):
                whole["reasons"][index] = choice["finish_reason"]
        if event.get("usage"):
            whole["num_tokens"] = event["usage"]["completion_tokens"]
    return whole


class Streams:
    """All of `bodies` at once; `strike` is called as soon as a quarter of them have had an event:
    when a client that is slower than the server sees the last begin, most are through.
    """

    def __init__(self, url: str, model: str) -> None:
        self.url = url
        self.bodies = bodies(model)
        self.begun: set[int] = set()
        self.longest_pause_s = 0.0

    async def run(self, strike: Callable[[], None] | None = None) -> list[dict[str, Any]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=120, limits=limits) as client:
            tasks = [asyncio.create_task(self._read(client, n)) for n in range(len(self.bodies))]
            if strike is not None:
                while len(self.begun) < len(tasks) // 4:
                    assert not all(task.done() for task in tasks)
                    await asyncio.sleep(0.005)  # polling, bounded by the streams
                strike()
            return list(await asyncio.gather(*tasks))

    async def _read(self, client: httpx.AsyncClient, number: int) -> dict[str, Any]:
        path, body = self.bodies[number]
        events: list[dict[str, Any]] = []
        last_s = None
        async with client.stream("POST", f"/v1/{path}", json=body) as answer:
            assert answer.status_code == 200, (await answer.aread()).decode()
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                now_s = time.monotonic()
                self.longest_pause_s = max(self.longest_pause_s, now_s - (last_s or now_s))
                last_s = now_s
                self.begun.add(number)
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    return gathered(events)
                event = json.loads(data)
                assert "error" not in event, event
                events.append(event)
        raise AssertionError("the stream was cut")


def engines_of(server: Any) -> list[dict[str, Any]]:
    found = httpx.get(f"{server.url}/console/status").json()
    return found.get("engines", [])


def wait_for_engines(server: Any, count: int) -> None:
    end_s = time.monotonic() + 120
    while sum(engine.get("state") == "serving" for engine in engines_of(server)) < count:
        assert time.monotonic() < end_s, engines_of(server)
        time.sleep(0.2)  # polling, bounded


def test_status_shows_every_engine(served_fleet: Any) -> None:
    wait_for_engines(served_fleet, 2)
    result = CliRunner().invoke(app, ["status", "--url", served_fleet.url, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert len({engine["id"] for engine in found["engines"]}) == 2
    assert found["num_blocks"] == sum(engine["num_blocks"] for engine in found["engines"])
    assert all(engine["step_budget"] >= 0 for engine in found["engines"])  # 0: no step yet
    metrics = httpx.get(f"{served_fleet.url}/metrics").text
    for engine in found["engines"]:
        assert f'legato_engine_serving{{engine="{engine["id"]}",model_name=' in metrics
    shown = CliRunner().invoke(app, ["status", "--url", f"{served_fleet.url}/v1"])
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("serving") == 2


def test_a_killed_engine_costs_no_byte(served_fleet: Any) -> None:
    wait_for_engines(served_fleet, 2)
    unfailed = asyncio.run(Streams(served_fleet.url, served_fleet.model).run())

    def strike() -> None:
        os.kill(victim["pid"], signal.SIGKILL)
        os.kill(victim["replica_pid"], signal.SIGKILL)

    num_moves = 0
    for _ in range(3):  # its streams may have ended before the kill
        victim = engines_of(served_fleet)[0]
        streams = Streams(served_fleet.url, served_fleet.model)
        failed = asyncio.run(streams.run(strike))
        for number, (path, body) in enumerate(streams.bodies):
            assert failed[number] == unfailed[number], (path, body)
        num_moves = httpx.get(f"{served_fleet.url}/console/status").json()["fleet"]["num_moves"]
        wait_for_engines(served_fleet, 2)  # Serve has replaced it, and the front has found it
        if num_moves > 0:
            break
    assert num_moves > 0


def test_a_machine_that_stands_still_moves_no_stream(served_fleet: Any) -> None:
    """Its front has heard nothing of the engines for longer than an engine may be silent."""
    wait_for_engines(served_fleet, 2)
    unfailed = asyncio.run(Streams(served_fleet.url, served_fleet.model).run())
    before = httpx.get(f"{served_fleet.url}/console/status").json()
    fronts = [p.pid for p in served_fleet.titled("ray::ServeReplica", "Front")]
    kinds = ("ray::ServeReplica", "ray::SchedulerActor", "ray::StageActor")
    found = {process.pid for kind in kinds for process in served_fleet.titled(kind)}
    engines = sorted(found - {*fronts})
    assert (len(fronts), len(engines) >= 6) == (1, True)
    streams = Streams(served_fleet.url, served_fleet.model)
    answers = asyncio.run(streams.run(lambda: stand_still(fronts, engines, 8.0)))
    assert answers == unfailed
    after = httpx.get(f"{served_fleet.url}/console/status").json()
    assert [engine["id"] for engine in after["engines"]] == [e["id"] for e in before["engines"]]
    assert after["fleet"]["num_moves"] == before["fleet"]["num_moves"]


def test_a_killed_front_cuts_its_streams_and_is_replaced(served_fleet: Any) -> None:
    """A client sees a broken connection, never an answer that looks whole."""
    wait_for_engines(served_fleet, 2)
    (front,) = served_fleet.titled("ray::ServeReplica", "Front")
    schedulers = [engine["pid"] for engine in engines_of(served_fleet)]
    body = {"model": served_fleet.model, "prompt": [7] * 5, "max_tokens": 1500, "ignore_eos": True}
    body["stream"] = True
    lines: list[str] = []

    def read() -> None:
        with httpx.stream("POST", f"{served_fleet.url}/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if not lines:
                    front.kill()
                lines.append(line)

    with pytest.raises(httpx.TransportError):
        read()
    assert lines
    assert "data: [DONE]" not in lines
    front.wait(30)  # until then its socket still accepts connections, to reset them
    end_s = time.monotonic() + 60
    while True:
        try:
            assert httpx.get(f"{served_fleet.url}/health").status_code == 200
        except httpx.ConnectError:  # nobody listens yet
            assert time.monotonic() < end_s
            time.sleep(0.1)  # polling, bounded
        else:
            break
    wait_for_engines(served_fleet, 2)
    end_s = time.monotonic() + 60
    while any(
        engine["num_running"] or engine["num_waiting"] for engine in engines_of(served_fleet)
    ):
        assert time.monotonic() < end_s
        time.sleep(0.2)  # polling, bounded
    assert {engine["pid"] for engine in engines_of(served_fleet)} == set(schedulers)


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM],
    ids=lambda n: n.name,
)
def test_a_server_told_to_stop_lets_streams_end(
    serve: Callable[..., Any], tiny_model: Callable[..., Path], number: signal.Signals
) -> None:
    """Ctrl-C, and what systemd, Docker and Kubernetes send."""
    args = {"model": {"path": str(tiny_model("llama", **SLOW))}, "kv": {"memory_gib": 0.01}}
    with serve(args, num_replicas=1) as server:
        streams = Streams(server.url, server.model)
        answers = asyncio.run(streams.run(lambda: server.process.send_signal(number)))
        assert all(answer["reasons"] for answer in answers)
        assert server.process.wait(60) == 0
        log = server.config.with_name("serve.log").read_text()
        assert log.count("draining and stopping") == 1


@pytest.mark.long
def test_a_fleet_without_requests_sleeps_and_a_request_wakes_it(
    serve: Callable[..., Any], tiny_model: Callable[..., Path]
) -> None:
    options = {"scaling": "slack", "idle_s": 3, "calm_s": 3}
    scaling = {
        "min_replicas": 0,
        "max_replicas": 1,
        "upscale_delay_s": 0,
        "downscale_delay_s": 0,
        "metrics_interval_s": 1,
        "policy": {
            "policy_function": "app.fleet.autoscaling:Autoscaler",
            "policy_kwargs": options,
        },
    }
    args = {
        "model": {"path": str(tiny_model("llama"))},
        "kv": {"memory_gib": 0.01},
        "fleet": {"sleeps": True, "start_within_s": 120},
    }
    with serve(args, autoscaling_config=scaling) as server, httpx.Client(timeout=150) as client:
        body = {"model": server.model, "prompt": [5, 6, 7], "max_tokens": 16, "temperature": 0}

        def ask() -> str:
            answer = client.post(f"{server.url}/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        awake = ask()
        for _ in range(2):
            end_s = time.monotonic() + 60
            while client.get(f"{server.url}/console/status").status_code == 200:
                assert time.monotonic() < end_s
                time.sleep(0.2)  # polling, bounded
            said = client.get(f"{server.url}/console/status").json()["reason"]
            assert "a request starts one" in said
            assert client.get(f"{server.url}/health").status_code == 200
            assert client.get(f"{server.url}/v1/models").json()["data"][0]["id"] == server.model
            asked = {"prompt_tokens": 3, "max_tokens": 16}
            quote = client.post(f"{server.url}/v1/slo/quote", json=asked).json()
            assert (quote["can_serve_now"], quote["retry_after_s"]) == (None, None)
            assert ask() == awake


@pytest.mark.long
def test_streams_go_on_without_controller_and_store(
    serve: Callable[..., Any], tiny_model: Callable[..., Path]
) -> None:
    """Serve's controller and the cluster's GCS are killed, and nothing brings them back: for as
    long as Ray's processes stand that, open streams go on and new requests are taken."""
    args = {"model": {"path": str(tiny_model("llama"))}, "kv": {"memory_gib": 0.01}}
    with serve(args, num_replicas=2) as server:
        wait_for_engines(server, 2)
        unfailed = asyncio.run(Streams(server.url, server.model).run())
        (store,), (controller,) = server.titled("gcs_server"), server.titled("ServeController")

        def strike() -> None:
            controller.kill()
            store.kill()

        assert asyncio.run(Streams(server.url, server.model).run(strike)) == unfailed
        end_s = time.monotonic() + 20
        while time.monotonic() < end_s:
            assert asyncio.run(Streams(server.url, server.model).run()) == unfailed
