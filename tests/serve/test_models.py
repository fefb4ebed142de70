"""Several models behind one address: each with its own engines, adapters, limits, objectives."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from typer.testing import CliRunner

from app.cli.main import app
from app.main import build_app
from tests import tiny_adapters
from tests.actors.stage import greedy_reference
from tests.live.reference import expected, make_prompts
from tests.ports import free_port
from tests.serve.test_adapters import texts_of

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]
LENGTHS = (9, 17)
MAX_TOKENS = 24
FAMILIES = {"one": "llama", "two": "qwen2"}
BASES = {"pirate": "one", "poet": "two", "bard": "two"}  # of adapters; the last is loaded live
ADAPTERS = ("pirate", "poet")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: tiny_adapters.write(root / name, FAMILIES[base], seed=seed)
        for seed, (name, base) in enumerate(BASES.items())
    }


@pytest.fixture(scope="module")
def served(
    own_serve: str, tiny_model: Callable[..., Path], folders: dict[str, Path]
) -> Iterator[tuple[httpx.Client, Any]]:
    """(a client, the handle) of a llama and a qwen of the same vocabulary, each with an adapter."""
    from ray import serve

    port = free_port()
    args = {
        "listen": f"127.0.0.1:{port}",
        "models": [
            {
                "model": {"path": str(tiny_model("llama")), "name": "one"},
                "adapters": {"max_adapters": 1, "paths": {"pirate": str(folders["pirate"])}},
            },
            {
                "model": {"path": str(tiny_model("qwen2")), "name": "two", "max_model_len": 96},
                "slo": {"tbt_ms": 5000},
                "fleet": {"routing": "least_loaded"},
                "adapters": {"max_adapters": 2, "paths": {"poet": str(folders["poet"])}},
            },
        ],
        "kv": {"block_size": 4, "memory_gib": 0.01},
        "scheduling": {"token_budget": 64, "max_requests": 16},
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
    parents = {model["id"]: model.get("parent") for model in listed}
    assert parents == {"one": None, "pirate": "one", "two": None, "poet": "two"}
    assert [model["max_model_len"] for model in listed] == [256, 256, 96, 96]
    for model in listed:
        assert client.get(f"/v1/models/{model['id']}").json() == model


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
    for name, length in (("one", 256), ("pirate", 256), ("two", 96), ("poet", 96)):
        answer = client.post(path, json={"model": name, **body})
        assert answer.status_code == 200, answer.text
        assert answer.json().get("model", name) == name
        assert answer.json().get("max_model_len", length) == length
    unknown = client.post(path, json={"model": "three", **body})
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"


def test_a_front_answers_a_batch_for_all_of_them(served: tuple[httpx.Client, Any]) -> None:
    client, _ = served
    caller = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none")
    names = ("one", "pirate", "two", "poet", "three")
    bodies = [{"model": name, "prompt": "a", "max_tokens": 3} for name in names]
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
    assert models == {name: name for name in names[:-1]}
    assert batch.request_counts.failed == 1


def test_limits_and_objectives_are_the_models_own(served: tuple[httpx.Client, Any]) -> None:
    client, _ = served
    body = {"prompt": list(range(100)), "max_tokens": 1}
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
    told = CliRunner().invoke(app, ["status", "--url", str(client.base_url), "--json"])
    assert [one["model"] for one in json.loads(told.output)] == ["one", "two"]
    metrics = client.get("/metrics").text
    assert metrics.count("# TYPE legato_generation_tokens_total counter") == 1
    assert 'legato_generation_tokens_total{model_name="two"}' in metrics


# ---- adapters ------------------------------------------------------------------------------------


def completed(client: httpx.Client, name: str) -> list[str]:
    """What this model or adapter answers to all prompts of the reference."""
    body = {"model": name, "max_tokens": greedy_reference.MAX_TOKENS, "temperature": 0}
    return [text_of(client, {**body, "prompt": ids}) for ids in greedy_reference.make_prompts()]


def text_of(client: httpx.Client, body: dict[str, Any]) -> str:
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@pytest.fixture(scope="module")
def references(tiny_model: Callable[..., Path], folders: dict[str, Path]) -> dict[str, list[str]]:
    """What transformers answers with each adapter merged."""
    found = {}
    for name, folder in folders.items():
        family = FAMILIES[BASES[name]]
        found[name] = texts_of(tiny_model(family), tiny_adapters.expected(folder, family))
    assert len(set(map(tuple, found.values()))) == len(found)
    return found


def test_each_adapter_answers_as_merged_into_its_own_model(
    served: tuple[httpx.Client, Any], references: dict[str, list[str]]
) -> None:
    client, handle = served
    for name in ADAPTERS:
        assert completed(client, name) == references[name]
        events = handle.generate.options(stream=True).remote(
            greedy_reference.make_prompts()[-1], model=name, max_tokens=greedy_reference.MAX_TOKENS
        )
        assert "".join(event["text"] for event in events) == references[name][-1]
        assert completed(client, BASES[name]) != references[name]


def test_chat_and_messages_reach_the_adapter(served: tuple[httpx.Client, Any]) -> None:
    client, _ = served
    messages = [{"role": "user", "content": "a"}]
    texts = {}
    for name in (*FAMILIES, *ADAPTERS):
        asked = {"model": name, "messages": messages}
        ids = client.post("/tokenize", json=asked).json()["tokens"]
        limits = {"max_tokens": MAX_TOKENS, "temperature": 0}
        texts[name] = text_of(client, {"model": name, "prompt": ids, **limits})
        chat = client.post("/v1/chat/completions", json=asked | limits).json()
        message = client.post("/v1/messages", json=asked | limits).json()
        assert (chat["model"], message["model"]) == (name, name)
        assert chat["choices"][0]["message"]["content"] == texts[name]
        assert "".join(block["text"] for block in message["content"]) == texts[name]
    assert len(set(texts.values())) == len(texts)


def test_the_tokens_of_an_adapter_are_counted_as_its_model_s(
    served: tuple[httpx.Client, Any],
) -> None:
    client, _ = served

    def counted() -> dict[str, float]:
        prefix = 'legato_generation_tokens_total{model_name="'
        lines = [x for x in client.get("/metrics").text.splitlines() if x.startswith(prefix)]
        return {x.split('"')[1]: float(x.split()[-1]) for x in lines}

    before = counted()
    text_of(client, {"model": "poet", "prompt": "a", "max_tokens": 5, "ignore_eos": True})
    assert counted() == {**before, "two": before["two"] + 5}


def test_one_is_loaded_and_unloaded_for_a_model_while_the_other_streams(
    served: tuple[httpx.Client, Any], folders: dict[str, Path], references: dict[str, list[str]]
) -> None:
    client, _ = served
    begun, ended = threading.Event(), threading.Event()

    def change(what: str, **body: Any) -> httpx.Response:
        return client.post(f"/v1/{what}_lora_adapter", json=body)

    def stream() -> list[str]:
        """The texts of one prompt, again and again."""
        caller, found = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none"), []
        while not ended.is_set():
            found.append("")
            for event in caller.completions.create(
                model="pirate",
                prompt=greedy_reference.make_prompts()[-1],
                max_tokens=greedy_reference.MAX_TOKENS,
                temperature=0,
                stream=True,
            ):
                begun.set()
                found[-1] += event.choices[0].text
        return found

    bard = {"lora_name": "bard", "lora_path": str(folders["bard"])}
    with ThreadPoolExecutor(1) as threads:
        streaming = threads.submit(stream)
        try:
            assert begun.wait(60)
            loaded = change("load", **bard, base_model_name="two")
            assert loaded.status_code == 200, loaded.text
            assert (loaded.json()["id"], loaded.json()["parent"]) == ("bard", "two")
            assert completed(client, "bard") == references["bard"]
            again = change("load", **bard, base_model_name="one")
            assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
            assert change("unload", lora_name="bard").json() == {"id": "bard", "num_running": 0}
            assert client.get("/v1/models/bard").status_code == 404
            assert completed(client, "poet") == references["poet"]
        finally:
            ended.set()
        texts = streaming.result(timeout=60)
    assert set(texts) == {references["pirate"][-1]}


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "base_model_name", "one, two"),
        ({"base_model_name": "three"}, "base_model_name", "No model 'three' here has slots"),
        ({"base_model_name": "poet"}, "base_model_name", "one, two."),
        ({"base_model_name": "one"}, "lora_name", "All 1 adapter slots"),
        ({"base_model_name": "two", "lora_name": "one"}, "lora_name", "'one' is served already"),
        ({"base_model_name": "two", "lora_name": "pirate"}, "lora_name", "is served already"),
        ({"base_model_name": "two", "lora_path": "/nowhere"}, "lora_path", "/nowhere is missing."),
    ],
)
def test_a_load_that_cannot_be_is_named(
    served: tuple[httpx.Client, Any],
    folders: dict[str, Path],
    body: dict[str, str],
    param: str,
    said: str,
) -> None:
    client, _ = served
    asked = {"lora_name": "bard", "lora_path": str(folders["bard"]), **body}
    refused = client.post("/v1/load_lora_adapter", json=asked)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
    assert said in refused.json()["error"]["message"]
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == [
        "one", "pirate", "two", "poet",
    ]  # fmt: skip
