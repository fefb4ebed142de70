"""`/v1/embeddings`, against numbers computed by hand."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from actors.scheduling.request import Objective
from app.api.events import RequestInfo, RequestOutcome, RequestTiming
from app.engine_client.client import EngineUnavailable, GenerationFailed, RequestRefused
from app.telemetry.live import KnownEngine, Telemetry
from app.telemetry.records import RecordLog, read_records
from app.text.processor import TextProcessor
from tests.app.api.conftest import MODEL, Server, StartServer


async def test_embeddings_are_normalized_and_in_order(server: Server) -> None:
    answer = await server.openai.embeddings.create(model=MODEL, input=["ab", "c"])
    assert answer.usage.prompt_tokens == 3
    for item, total in zip(answer.data, (97 + 98, 99), strict=True):
        raw = [float(total), 1.0, 2.0, 4.0]  # what HandEngine pools
        length = math.sqrt(sum(value * value for value in raw))
        assert item.embedding == pytest.approx([value / length for value in raw])
    assert {request.pooling for request in server.engine.seen} == {"mean"}


async def test_as_many_inputs_as_openai_takes_go_to_the_engine_in_turn(server: Server) -> None:
    """A client's own default may be a thousand; a request without end would fill the queue."""
    server.engine.gate = asyncio.Event()
    texts = [chr(97 + number % 26) for number in range(2048)]
    creating = asyncio.create_task(server.openai.embeddings.create(model=MODEL, input=texts))
    await server.engine.at_gate.wait()
    assert server.engine.num_running == len(server.engine.seen) == 256
    server.engine.gate.set()
    answer = await creating
    assert [item.index for item in answer.data] == [*range(2048)]
    assert len(server.engine.seen) == answer.usage.prompt_tokens == 2048
    for text, item in zip(texts, answer.data, strict=True):
        assert item.embedding[0] / item.embedding[1] == pytest.approx(ord(text))


async def test_embeddings_as_they_are(server: Server) -> None:
    answer = await server.http.post(
        "/v1/embeddings",
        json={"model": MODEL, "input": [[97, 98]], "pooling": "last", "normalize": False},
    )
    assert answer.json()["data"][0]["embedding"] == [195.0, 1.0, 2.0, 4.0]
    assert server.engine.seen[-1].pooling == "last"


@pytest.mark.parametrize(("own", "code"), [("last", 200), (None, 400)])
async def test_the_models_own_pooling_is_the_default(
    server: Server,
    text: TextProcessor,
    monkeypatch: pytest.MonkeyPatch,
    own: str | None,
    code: int,
) -> None:
    monkeypatch.setattr(text, "pooling", own)
    answer = await server.http.post("/v1/embeddings", json={"model": MODEL, "input": "ab"})
    assert answer.status_code == code
    if own is None:
        assert answer.json()["error"]["param"] == "pooling"
    else:
        assert server.engine.seen[-1].pooling == own


async def test_models_without_embeddings_say_so(start_server: StartServer) -> None:
    server = await start_server(supports_embeddings=False)
    answer = await server.http.post("/v1/embeddings", json={"model": MODEL, "input": "a"})
    assert answer.status_code == 400


def value(telemetry: Telemetry, name: str, **labels: str) -> float | None:
    metrics = telemetry.metrics_now()
    return metrics.registry.get_sample_value(f"legato_{name}", {"model_name": "tiny", **labels})


def logged_requests(folder: Path) -> list[dict[str, Any]]:
    (file,) = folder.glob("requests-*.parquet")
    return read_records(file, "requests")


async def test_embeddings_count_as_completions_do(
    start_server: StartServer, tmp_path: Path
) -> None:
    """Several inputs are one request, and their vectors are its first token."""
    objective = Objective(tbt_s=0.001, ttft_s=60.0)
    telemetry = Telemetry("tiny", KnownEngine(objective), log=RecordLog(tmp_path, {}))
    server = await start_server(events=telemetry)
    server.engine.num_cached_tokens = 2
    inputs = {"model": MODEL, "input": ["abcde", "fgh"], "user": "ann"}
    answer = await server.http.post("/v1/embeddings", json=inputs)
    assert answer.json()["usage"]["prompt_tokens"] == 8
    assert value(telemetry, "goodput_requests_total") == 1
    assert value(telemetry, "time_to_first_token_seconds_count") == 1
    assert value(telemetry, "generation_tokens_total") == 0
    assert value(telemetry, "inter_token_latency_seconds_count") == 0
    assert value(telemetry, "prefix_cache_hit_tokens_total") == 4
    assert len({request.arrived_s for request in server.engine.seen} - {None}) == 1
    late = {**inputs, "slo": {"ttft_ms": 1e-6}}
    await server.http.post("/v1/embeddings", json=late)
    assert value(telemetry, "goodput_requests_total") == 1
    server.engine.script = lambda request, index: [97] * 3
    completion = {"model": MODEL, "prompt": "abcdefg", "max_tokens": 3}
    await server.http.post("/v1/completions", json=completion)
    assert value(telemetry, "prompt_tokens_total") == 8 + 8 + 7
    assert value(telemetry, "request_success_total", finished_reason="stop") == 2
    assert value(telemetry, "request_success_total", finished_reason="length") == 1
    assert value(telemetry, "generation_tokens_total") == 3
    telemetry.close()
    kept, missed, _ = logged_requests(tmp_path)
    assert (kept["endpoint"], kept["tenant"]) == ("/v1/embeddings", "ann")
    assert (kept["num_prompt_tokens"], kept["num_output_tokens"]) == (8, 0)
    assert (kept["status"], kept["reason"]) == (200, "stop")
    assert 0.0 < kept["ttft_s"] <= kept["e2e_s"]
    assert (kept["max_tbt_s"], kept["kept_objectives"]) == (0.0, True)
    assert missed["kept_objectives"] is False


@pytest.mark.parametrize(
    ("refusal", "status", "reason"),
    [
        (RequestRefused("overloaded", retry_after_s=1.0), 429, "overloaded"),
        (EngineUnavailable("rebuilt"), 503, "engine_unavailable"),
        (GenerationFailed("lost"), 500, "generation_failed"),
        (RuntimeError("not an engine's"), 500, "server_error"),
    ],
)
async def test_embeddings_that_fail_count_as_failures(
    start_server: StartServer, refusal: Exception, status: int, reason: str
) -> None:
    telemetry = Telemetry("tiny", KnownEngine(Objective(ttft_s=60.0)))
    server = await start_server(events=telemetry)
    server.engine.refusal = refusal
    answer = await server.http.post("/v1/embeddings", json={"model": MODEL, "input": ["a", "b"]})
    assert answer.status_code == status
    assert value(telemetry, "request_failure_total", status=str(status), reason=reason) == 1
    assert value(telemetry, "time_to_first_token_seconds_count") == 0
    assert value(telemetry, "goodput_requests_total") == 0


async def test_a_client_that_leaves_its_embeddings_counts_as_a_failure(
    start_server: StartServer,
) -> None:
    class Ended(Telemetry):
        def on_finish(
            self, request: RequestInfo, outcome: RequestOutcome, now_s: float
        ) -> RequestTiming | None:
            finished.set()
            return super().on_finish(request, outcome, now_s)

    finished, telemetry = asyncio.Event(), Ended("tiny")
    server = await start_server(events=telemetry)
    server.engine.gate = asyncio.Event()
    body = json.dumps({"model": MODEL, "input": ["abc", "d"] * 200}).encode()
    head = b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    await server.engine.at_gate.wait()
    writer.close()
    await finished.wait()
    await server.engine.all_idle.wait()
    assert len(server.engine.closed) == len(server.engine.seen) == 256  # the others never started
    assert value(telemetry, "request_failure_total", status="200", reason="disconnect") == 1
    assert value(telemetry, "goodput_requests_total") == 0
