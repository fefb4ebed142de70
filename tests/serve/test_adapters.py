"""LoRA adapters on a live engine: models of their own, loaded and unloaded while it serves."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from actors.scheduling.request import SamplingParams
from app.engine_client.adapters import AdapterEngine
from app.engine_client.client import EngineClient, GenerationRequest
from app.settings.load import parse
from app.settings.model_folder import SettingsError
from app.text.processor import TextProcessor
from tests import tiny_adapters
from tests.actors.stage.greedy_reference import GREEDY, MAX_TOKENS, expected, make_prompts
from tests.serve.live_server import LiveServer, live_server

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [tiny_adapters.write(root / f"a{n}", seed=n) for n in range(3)]


@pytest.fixture(scope="module")
def server(
    ray_cluster: None, tiny_model: Callable[..., Path], folders: list[Path]
) -> Iterator[LiveServer]:
    paths = {"zero": str(folders[0]), "one": str(folders[1])}
    with live_server(
        tiny_model("llama"),
        parallel={"pipeline_stages": 2},
        scheduling={"token_budget": 32},
        kv={"block_size": 4, "memory_gib": 0.01},
        adapters={"max_adapters": 3, "max_rank": 8, "paths": paths},
    ) as started:
        yield started


def engine_of(server: LiveServer) -> AdapterEngine:
    assert isinstance(server.engine, AdapterEngine)
    return server.engine


async def tokens(
    engine: EngineClient, name: str, prompt: Sequence[int], begun: asyncio.Event | None = None
) -> tuple[list[int], int]:
    """What it answers, and how many tokens of the prompt were cached."""
    found, num_cached = list[int](), 0
    request = GenerationRequest(name, tuple(prompt), GREEDY)
    async for chunk in engine.generate(request):
        found += chunk.tokens
        num_cached = max(num_cached, chunk.num_cached_tokens)
        if begun is not None:
            begun.set()
    return found, num_cached


def everywhere(
    server: LiveServer, names: Sequence[str | None], interrupt: Callable[[], None] | None = None
) -> list[list[tuple[list[int], int]]]:
    """All prompts to all of these models at once: by model (None: the base), by prompt."""

    async def ask_all() -> list[list[tuple[list[int], int]]]:
        engine, begun = engine_of(server), asyncio.Event()
        asked = [
            tokens(engine if name is None else engine.adapters[name], f"{name}-{n}", prompt, begun)
            for name in names
            for n, prompt in enumerate(make_prompts())
        ]
        gathered = asyncio.gather(*asked)
        if interrupt is not None:
            await begun.wait()
            interrupt()
        answers = await gathered
        each = len(make_prompts())
        return [answers[start : start + each] for start in range(0, len(answers), each)]

    return asyncio.run_coroutine_threadsafe(ask_all(), server.loop).result(timeout=180)


def plain(answers: list[list[tuple[list[int], int]]]) -> list[list[list[int]]]:
    return [[found for found, _ in of_model] for of_model in answers]


def test_models_share_batches_and_no_cached_prefix(server: LiveServer, folders: list[Path]) -> None:
    """The prompts are the same for all models: what one has cached is wrong for another."""
    names = (None, "zero", "one")
    wanted = [expected("llama"), *map(tiny_adapters.expected, folders[:2])]
    assert plain(everywhere(server, names)) == wanted
    again = everywhere(server, names)
    assert plain(again) == wanted
    assert all(of_model[-1][1] > 0 for of_model in again)  # the longest prompt: cached by now


def kill_a_stage(server: LiveServer) -> None:
    async def pids() -> list[list[int]]:
        return await server.engine.stage_pids()

    asyncio.ensure_future(pids(), loop=server.loop).add_done_callback(
        lambda asked: os.kill(asked.result()[1][0], signal.SIGKILL)
    )


@pytest.mark.parametrize("victim", ["stage", pytest.param("scheduler", marks=pytest.mark.long)])
def test_a_lost_engine_keeps_the_adapters(
    server: LiveServer, folders: list[Path], victim: str
) -> None:
    ends: dict[str, Callable[[], None]] = {
        "stage": lambda: kill_a_stage(server),
        "scheduler": lambda: server.engine._link.kill(),
    }
    answers = everywhere(server, (None, "zero", "one"), ends[victim])
    assert plain(answers) == [expected("llama"), *map(tiny_adapters.expected, folders[:2])]


def post(server: LiveServer, what: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{what}_lora_adapter", json=body, timeout=60)


def complete(server: LiveServer, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "hello", "max_tokens": 4, "temperature": 0}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def listed(server: LiveServer) -> dict[str, str | None]:
    models = httpx.get(f"{server.url}/v1/models").json()["data"]
    return {model["id"]: model.get("parent") for model in models}


def test_loaded_and_unloaded_over_http(
    server: LiveServer, folders: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    base = {server.model: None, "zero": server.model, "one": server.model}
    assert listed(server) == base
    assert complete(server, "two").status_code == 404
    with caplog.at_level(logging.WARNING, "legato.audit"):
        path = str(folders[2])
        other = post(server, "load", lora_name="two", lora_path=path, base_model_name="zero")
        assert (other.status_code, other.json()["error"]["param"]) == (400, "base_model_name")
        loaded = post(server, "load", lora_name="two", lora_path=path, base_model_name=server.model)
    assert loaded.status_code == 200, loaded.text
    assert loaded.json()["parent"] == server.model
    assert "load_lora_adapter" in caplog.text
    assert listed(server) == {**base, "two": server.model}
    assert complete(server, "two").json()["model"] == "two"
    assert plain(everywhere(server, ["two"])) == [tiny_adapters.expected(folders[2])]

    again = post(server, "load", lora_name="two", lora_path=str(folders[2]))
    assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
    full = post(server, "load", lora_name="three", lora_path=str(folders[2]))
    assert full.status_code == 400
    assert "All 3 adapter slots are taken" in full.json()["error"]["message"]

    gone = post(server, "unload", lora_name="two")
    assert (gone.status_code, gone.json()) == (200, {"id": "two", "num_running": 0})
    assert post(server, "unload", lora_name="two").status_code == 404
    assert complete(server, "two").status_code == 404
    assert listed(server) == base

    bad = post(server, "load", lora_name="two", lora_path="/nowhere")
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "lora_path")
    assert "/nowhere is missing" in bad.json()["error"]["message"]
    # The slot that was full of another adapter: nothing is left of that.
    assert post(server, "load", lora_name="two", lora_path=str(folders[0])).status_code == 200
    assert plain(everywhere(server, ["two"])) == [tiny_adapters.expected(folders[0])]
    assert post(server, "unload", lora_name="two").status_code == 200


@pytest.mark.long
def test_a_change_waits_for_a_lost_scheduler(server: LiveServer, folders: list[Path]) -> None:
    server.engine._link.kill()
    assert post(server, "load", lora_name="two", lora_path=str(folders[2])).is_success
    assert plain(everywhere(server, ["two"])) == [tiny_adapters.expected(folders[2])]
    server.engine._link.kill()
    assert post(server, "unload", lora_name="two").is_success


def test_a_lost_folder_costs_only_its_own_requests(
    server: LiveServer, folders: list[Path], tmp_path: Path
) -> None:
    """Stages that are built anew read the folders again, of which one is no longer there."""
    shutil.copytree(folders[2], tmp_path / "two")
    assert post(server, "load", lora_name="two", lora_path=str(tmp_path / "two")).is_success
    assert complete(server, "two").is_success
    shutil.rmtree(tmp_path / "two")

    answers = everywhere(server, (None, "zero", "one"), lambda: kill_a_stage(server))
    assert plain(answers) == [expected("llama"), *map(tiny_adapters.expected, folders[:2])]
    lost = complete(server, "two")
    assert lost.status_code == 400, lost.text
    assert "o adapter is loaded in slot 2" in lost.json()["error"]["message"]
    assert complete(server, "one").is_success

    assert post(server, "unload", lora_name="two").is_success
    assert post(server, "load", lora_name="two", lora_path=str(folders[2])).is_success
    assert plain(everywhere(server, ["two"])) == [tiny_adapters.expected(folders[2])]
    assert post(server, "unload", lora_name="two").is_success


def test_an_unloaded_adapter_keeps_its_slot_while_it_runs(
    server: LiveServer, folders: list[Path]
) -> None:
    async def run() -> list[int]:
        engine = engine_of(server)
        await engine.load_adapter("two", str(folders[2]))
        sampling = SamplingParams(max_tokens=150)
        stream = engine.adapters["two"].generate(
            GenerationRequest("long", tuple(make_prompts()[0]), sampling)
        )
        first = await anext(stream)
        assert await engine.unload_adapter("two") == 1
        assert "two" not in engine.adapters
        assert engine._free_slots() == []
        found = list(first.tokens)
        async for chunk in stream:
            found += chunk.tokens
        assert len(engine._free_slots()) == 1
        return found

    found = asyncio.run_coroutine_threadsafe(run(), server.loop).result(timeout=120)
    wanted = tiny_adapters.expected(folders[2])[0]
    assert found[: len(wanted)] == wanted


def test_settings_that_cannot_be(tiny_model: Callable[..., Path]) -> None:
    args: dict[str, Any] = {"model": {"path": str(tiny_model("llama"))}}
    with pytest.raises(SettingsError, match="2 paths, but max_adapters is 1"):
        parse({**args, "adapters": {"max_adapters": 1, "paths": {"a": "x", "b": "y"}}})


def texts_of(folder: Path, answers: Sequence[Sequence[int]]) -> list[str]:
    """Of all prompts, behind each of which a character may be unfinished."""
    text, found = TextProcessor(folder), list[str]()
    for prompt, tokens in zip(make_prompts(), answers, strict=True):
        detokenizer = text.detokenizer(prompt)
        found.append(detokenizer.push(tuple(tokens)) + detokenizer.flush())
    text.close()
    return found


@pytest.mark.long
def test_every_engine_of_a_fleet_has_the_adapters(
    serve: Callable[..., Any], tiny_model: Callable[..., Path], folders: list[Path]
) -> None:
    """Both engines answer, then the one that is left when the other has died; it loads another."""
    folder = tiny_model("llama")
    paths = {"zero": str(folders[0]), "one": str(folders[1])}
    args = {
        "model": {"path": str(folder)},
        "kv": {"memory_gib": 0.01},
        "adapters": {"max_adapters": 2, "max_rank": 8, "paths": paths},
    }
    wanted = [expected("llama"), *map(tiny_adapters.expected, folders[:2])]
    texts = [texts_of(folder, of_model) for of_model in wanted]

    with serve(args, num_replicas=2) as server:

        def ask(asked: tuple[str, list[int]]) -> str:
            body = {"model": asked[0], "prompt": asked[1], "max_tokens": MAX_TOKENS}
            answer = httpx.post(
                f"{server.url}/v1/completions", json={**body, "temperature": 0}, timeout=120
            )
            return str(answer.json()["choices"][0]["text"])

        def ask_all() -> list[list[str]]:
            asked = [(n, p) for n in (server.model, "zero", "one") for p in make_prompts()]
            with ThreadPoolExecutor(len(asked)) as threads:
                found = list(threads.map(ask, asked))
            each = len(make_prompts())
            return [found[start : start + each] for start in range(0, len(found), each)]

        assert ask_all() == texts
        engines = server.titled("ray::ServeReplica", "Engine")
        assert len(engines) == 2
        engines[0].kill()
        engines[0].wait(30)
        assert ask_all() == texts
        listed = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert {model["id"] for model in listed} == {server.model, "zero", "one"}

        assert post(server, "unload", lora_name="one").is_success
        loaded = post(server, "load", lora_name="two", lora_path=str(folders[2]))
        assert loaded.json()["parent"] == server.model
        found = [ask(("two", prompt)) for prompt in make_prompts()]
        assert found == texts_of(folder, tiny_adapters.expected(folders[2]))
        gone = httpx.get(f"{server.url}/v1/models/one")
        assert gone.status_code == 404
