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
from tests.serve.fleet_streams import Streams, engines_of, wait_for_engines
from tests.standstill import stand_still
from tests.tiny_models import SLOW

pytestmark = [pytest.mark.serve, pytest.mark.timeout(280)]


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


def test_a_killed_engine_costs_no_byte(served_fleet: Any, unfailed: list[dict[str, Any]]) -> None:
    wait_for_engines(served_fleet, 2)

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


def test_a_machine_that_stands_still_moves_no_stream(
    served_fleet: Any, unfailed: list[dict[str, Any]]
) -> None:
    """Its front has heard nothing of the engines for longer than an engine may be silent."""
    wait_for_engines(served_fleet, 2)
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
    fleets = [status["fleet"] for status in (before, after)]
    assert len({fleet["num_engines_lost"] for fleet in fleets}) == 1
    # Streams that are late after it may move from one engine to the other.
    assert len({fleet["num_moves"] - fleet["num_balanced"] for fleet in fleets}) == 1


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


# A lone replica's streams end at SIGTERM in tests/test_installation.py.
@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_server_told_to_stop_lets_streams_end(
    serve: Callable[..., Any], tiny_model: Callable[..., Path], number: signal.Signals
) -> None:
    """Ctrl-C, and what systemd, Docker and Kubernetes send."""
    args = {
        "model": {"path": str(tiny_model("llama", **SLOW))},
        "kv": {"memory_gib": 0.01},
        "scheduling": {"token_budget": 64},
    }
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
