"""Several models behind one address: each with its own engines, tokens, limits and objectives."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from app.main import build_app
from tests.live.reference import expected, make_prompts
from tests.ports import free_port

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]
LENGTHS = (9, 17)
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def served(own_serve: None, tiny_model: Callable[..., Path]) -> Iterator[tuple[httpx.Client, Any]]:
    """(a client, the handle) of a llama and a qwen of the same vocabulary."""
    from ray import serve

    port = free_port()
    args = {
        "listen": f"127.0.0.1:{port}",
        "models": [
            {"model": {"path": str(tiny_model("llama")), "name": "one"}},
            {
                "model": {"path": str(tiny_model("qwen2")), "name": "two", "max_model_len": 64},
                "slo": {"tbt_ms": 5000},
                "fleet": {"routing": "least_loaded"},
            },
        ],
        "kv": {"block_size": 4, "memory_gib": 0.01},
        "scheduling": {"max_requests": 16},
    }
    handle = serve.run(build_app(args), name="models", route_prefix="/models")
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        end_s = time.monotonic() + 60
        while not all(client.get("/health").json().get("models", {"": False}).values()):
            assert time.monotonic() < end_s
            time.sleep(0.1)  # polling, bounded
        yield client, handle
    serve.delete("models")


def test_all_are_listed_with_their_limits(served: tuple[httpx.Client, Any]) -> None:
    client, _ = served
    listed = client.get("/v1/models").json()["data"]
    lengths = {model["id"]: model["max_model_len"] for model in listed}
    assert list(lengths) == ["one", "two"]
    assert lengths["two"] == 64 < lengths["one"]
    assert client.get("/v1/models/two").json() == listed[1]


def test_each_answers_with_its_own_tokens(served: tuple[httpx.Client, Any]) -> None:
    client, handle = served
    prompts = make_prompts(LENGTHS)
    for name, family in (("one", "llama"), ("two", "qwen2")):
        right = expected(family, LENGTHS, MAX_TOKENS)
        for prompt, tokens in zip(prompts, right, strict=True):
            shown = {"model": name, "tokens": list(tokens), "skip_special_tokens": True}
            text = client.post("/detokenize", json=shown).json()
            body = {"model": name, "prompt": list(prompt), "temperature": 0, "ignore_eos": True}
            answer = client.post("/v1/completions", json={**body, "max_tokens": MAX_TOKENS}).json()
            assert answer["model"] == name
            assert answer["choices"][0]["text"] == text["prompt"]
        events = handle.generate.options(stream=True).remote(
            list(prompts[0]), model=name, max_tokens=MAX_TOKENS, ignore_eos=True
        )
        assert [token for event in events for token in event["tokens"]] == list(right[0])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/slo/quote", {"prompt": "a", "max_tokens": 2}),
        ("/tokenize", {"prompt": "a"}),
    ],
)
def test_every_endpoint_takes_the_model_that_is_named(
    served: tuple[httpx.Client, Any], path: str, body: dict[str, Any]
) -> None:
    client, _ = served
    for name, length in (("one", None), ("two", 64)):
        answer = client.post(path, json={"model": name, **body})
        assert answer.status_code == 200, answer.text
        assert answer.json().get("model", name) == name
        if length is not None and "max_model_len" in answer.json():
            assert answer.json()["max_model_len"] == length
    unknown = client.post(path, json={"model": "three", **body})
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"


def test_a_front_answers_a_batch_for_all_of_them(served: tuple[httpx.Client, Any]) -> None:
    client, _ = served
    caller = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none")
    bodies = [{"model": name, "prompt": "a", "max_tokens": 3} for name in ("one", "two", "three")]
    lines = [
        {"custom_id": body["model"], "method": "POST", "url": "/v1/completions", "body": body}
        for body in bodies
    ]
    content = "\n".join(json.dumps(line) for line in lines).encode()
    file = caller.files.create(file=("in.jsonl", content), purpose="batch")
    batch = caller.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    end_s = time.monotonic() + 60
    while (batch := caller.batches.retrieve(batch.id)).status != "completed":
        assert time.monotonic() < end_s
        time.sleep(0.05)  # polling, bounded
    answers = [json.loads(x) for x in caller.files.content(batch.output_file_id).text.splitlines()]
    models = {one["custom_id"]: one["response"]["body"]["model"] for one in answers}
    assert models == {"one": "one", "two": "two"}
    assert batch.request_counts.failed == 1


def test_limits_and_objectives_are_the_models_own(served: tuple[httpx.Client, Any]) -> None:
    client, _ = served
    body = {"prompt": list(range(80)), "max_tokens": 1}
    assert client.post("/v1/completions", json={"model": "one", **body}).status_code == 200
    refused = client.post("/v1/completions", json={"model": "two", **body})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    shown = {
        name: client.get("/console/status", params={"model": name}).json()
        for name in ("one", "two")
    }
    assert shown["one"]["tbt_s"] is None
    assert shown["two"]["tbt_s"] == 5.0
    assert shown["one"]["engines"][0]["id"] != shown["two"]["engines"][0]["id"]
    assert client.get("/console/status", params={"model": "three"}).status_code == 404
    metrics = client.get("/metrics").text
    assert metrics.count("# TYPE legato_generation_tokens_total counter") == 1
    assert 'legato_generation_tokens_total{model_name="two"}' in metrics
