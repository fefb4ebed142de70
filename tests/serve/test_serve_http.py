"""The main job over real HTTP: what a new user does in the first five minutes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from typer.testing import CliRunner

from app.cli.main import app
from app.text.processor import TextProcessor
from tests.live.reference import MAX_TOKENS, expected, make_prompts
from tests.serve.server_process import Server

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]
KINDS = {"app.text.grammar_worker", "ray::StageActor"}  # of processes that compile grammars


@pytest.fixture(scope="module")
def server(
    serve: Callable[..., Any],
    tiny_model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    """Started in a folder with a package of the user's own that has the name of ours."""
    cwd = tmp_path_factory.mktemp("own")
    (cwd / "app").mkdir()
    (cwd / "app/__init__.py").write_text("raise SystemExit('the user has an app too')")
    args = {
        "model": {"path": str(tiny_model("llama"))},
        "parallel": {"pipeline_stages": 2},
        "scheduling": {"token_budget": 64, "max_requests": 32},
        "kv": {"block_size": 4, "memory_gib": 0.01},
    }
    with serve(args, cwd=cwd) as started:
        yield started


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_the_first_grammar_finds_its_compilers_loaded(server: Server) -> None:
    """No request has asked for one yet: the child that checks it and the stage that follows it have
    begun by themselves."""
    loaded: set[str] = set()
    deadline_s = time.monotonic() + 60.0
    while loaded != KINDS:
        assert time.monotonic() < deadline_s, loaded
        time.sleep(0.05)
        for kind in KINDS - loaded:
            for process in server.titled(kind):
                with suppress(psutil.Error):  # it has just ended
                    if any("llguidance" in mapped.path for mapped in process.memory_maps()):
                        loaded.add(kind)


def test_openai_package_streams_a_chat(client: openai.OpenAI, server: Server) -> None:
    stream = client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "hello"}],
        stream=True,
        max_tokens=12,
        temperature=0,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    text, reason, usage = "", None, None
    for chunk in stream:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason or reason
        usage = chunk.usage or usage
    assert reason == "length"
    assert usage is not None
    assert usage.completion_tokens == 12
    whole = client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=12,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert whole.choices[0].message.content == text


def _timing(server: Server, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """`timing` of the last event but [DONE], and how many gaps there were between the others."""
    content = {"model": server.model, "stream": True, "max_tokens": 12, "ignore_eos": True, **body}
    content["stream_options"] = {"include_timing": True}
    answer = httpx.post(f"{server.url}{path}", json=content, timeout=60)
    *events, done = [line[6:] for line in answer.text.split("\n") if line.startswith("data: ")]
    assert done == "[DONE]"
    *deliveries, last = map(json.loads, events)
    timing: dict[str, Any] = last["timing"]
    assert 0 <= timing["queue_ms"] <= timing["ttft_ms"]
    indices = [choice["index"] for event in deliveries for choice in event["choices"]]
    return timing, len(indices) - len(set(indices))


def test_a_stream_says_whether_its_own_objective_was_kept(server: Server) -> None:
    """No gap is under a microsecond, and none over an hour."""
    path, text = "/v1/completions", {"prompt": "x"}
    timing, num_missed = _timing(server, path, {**text, "n": 2, "slo": {"tbt_ms": 0.001}})
    assert timing["objective_kept"] is False
    assert timing["max_tbt_ms"] > 0.001
    timing, num_kept = _timing(server, path, {**text, "slo": {"tbt_ms": 3_600_000}})
    assert timing["objective_kept"] is True
    settings = f"{server.url}/console/settings"
    assert httpx.post(settings, json={"slo.tbt_ms": 0.001}).status_code == 200
    timing, num_more = _timing(server, path, text)  # held to the deployment's, as it is now
    assert timing["objective_kept"] is False
    assert httpx.post(settings, json={"slo.tbt_ms": None}).status_code == 200
    body = {"messages": [{"role": "user", "content": "hello"}]}
    assert _timing(server, "/v1/chat/completions", body)[0]["objective_kept"] is None
    # Tokens that came late may still be without the records that explain them.
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    missed = [line for line in lines if line.startswith("legato_tbt_objective_missed_total{")]
    (kept,) = (line for line in lines if line.startswith("legato_tbt_objective_kept_total{"))
    assert 0 < sum(float(line.split()[-1]) for line in missed) <= num_missed + num_more
    # Tokens that come together have no gap between them: it is kept whatever the objective.
    assert 0 < num_kept <= float(kept.split()[-1])


def test_forty_concurrent_completions_equal_transformers(
    server: Server, tiny_model: Callable[..., Path]
) -> None:
    """Token-id prompts over HTTP, all at once, one server of two stages."""
    prompts = make_prompts()

    def complete(prompt: tuple[int, ...]) -> list[int]:
        body = {
            "model": server.model,
            "prompt": list(prompt),
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,
        }
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
        assert answer["usage"]["completion_tokens"] == MAX_TOKENS
        return [len(answer["choices"][0]["logprobs"]["tokens"]), answer["choices"][0]["text"]]

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(complete, prompts))
    # The tiny model speaks in random bytes; one detokenizer says how broken ones are shown.
    processor = TextProcessor(tiny_model("llama"))
    for prompt, (count, text), tokens in zip(prompts, answers, expected("llama"), strict=True):
        assert count == MAX_TOKENS
        detokenizer = processor.detokenizer(prompt)
        assert text == detokenizer.push(tokens) + detokenizer.flush()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [7] * 5000}, "prompt"),
        ({"prompt": "x", "no_such_parameter": 1}, "no_such_parameter"),
        ({"prompt": "x", "max_tokens": "many"}, "max_tokens"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": [10**9]}, "prompt"),
    ],
)
def test_bad_input_is_named_at_once(server: Server, body: dict[str, Any], param: str) -> None:
    answer = httpx.post(
        f"{server.url}/v1/completions", json={"model": server.model, **body}, timeout=10
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert param in (error["param"] or "") or param in error["message"]


def test_disconnect_frees_the_engine(server: Server) -> None:
    body = {
        "model": server.model,
        "prompt": [5] * 20,
        "max_tokens": 230,
        "ignore_eos": True,
        "stream": True,
    }
    for _ in range(5):
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    json.loads(line.removeprefix("data: "))
                    break
    ok = httpx.post(
        f"{server.url}/v1/completions",
        json={**body, "stream": False, "max_tokens": 4},
        timeout=20,
    )
    assert ok.json()["usage"]["completion_tokens"] == 4


def test_probes_and_openapi(server: Server) -> None:
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/live").status_code == 200
    assert "/v1/chat/completions" in httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert httpx.get(f"{server.url}/no/such/route").json()["error"]["message"]


def test_legato_bench_overhead_reads_its_processes_and_its_feed(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It would wait for the stages of all tests beside it.
    monkeypatch.setattr("app.bench.engine.overhead.wait_until_idle", lambda: None)
    out = tmp_path / "report.json"
    options = ["--url", server.url, "--streams", "1", "--tokens", "60", "--idle-s", "1"]
    result = CliRunner().invoke(app, ["bench", "overhead", *options, "--out", str(out)])
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert found["num_tokens"] == 60
    assert 0 < found["gap_between_steps_ms_p50"] < 1000
    assert {"replica", "scheduler", "stage"} <= set(found["cpu_us_per_token"])
