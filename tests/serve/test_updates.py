"""A fleet's model changes, weights and tokenizer, under its open streams."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

pytestmark = [pytest.mark.serve, pytest.mark.long, pytest.mark.timeout(600)]

NUM_STREAMS = 2
MAX_TOKENS = 20_000  # more than are decoded while new engines and fronts start


def body_of(model: str, number: int, max_tokens: int) -> dict[str, Any]:
    body = {"model": model, "prompt": [5 + number, 6, 7], "max_tokens": max_tokens}
    return body | {"ignore_eos": True, "temperature": 0.9, "seed": number, "stream": True}


async def read(
    client: httpx.AsyncClient, body: dict[str, Any], begun: asyncio.Semaphore | None = None
) -> str:
    """The whole text. begun: released with the first event."""
    texts: list[str] = []
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, (await answer.aread()).decode()
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return "".join(texts)
            if line:
                texts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                if begun is not None and len(texts) == 1:
                    begun.release()
    raise AssertionError("the stream was cut")


async def trial(server: Any, change: Callable[[], None]) -> None:
    async def ask() -> str:
        # A connection of its own, which the new front takes as soon as it is there.
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            return await read(client, body_of(server.model, 0, 40))

    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

        async def all_streams(begun: asyncio.Semaphore | None = None) -> list[str]:
            bodies = [body_of(server.model, n, MAX_TOKENS) for n in range(NUM_STREAMS)]
            return await asyncio.gather(*[read(client, body, begun) for body in bodies])

        before = await ask()
        unfailed = await all_streams()
        begun = asyncio.Semaphore(0)
        streams = asyncio.create_task(all_streams(begun))
        for _ in range(NUM_STREAMS):
            await begun.acquire()
        change()
        while (after := await ask()) == before:
            assert not streams.done(), "the streams ended before the new weights served"
        assert await streams == unfailed
        assert await ask() == after


def spell_differently(folder: Path) -> None:
    """Tokens have other texts: what one model computes reads wrong by the other's tokenizer."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {c: (i + 1) % len(vocab) for c, i in vocab.items()}
    file.write_text(json.dumps(tokenizer))


def test_open_streams_keep_the_weights_that_they_began_with(
    serve: Callable[..., Any], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folders = []
    for seed in (0, 1):
        folder = tmp_path / str(seed) / "llama"
        made = tiny_model("llama", seed=seed, max_position_embeddings=2 * MAX_TOKENS)
        shutil.copytree(made, folder)
        folders.append(str(folder))
    spell_differently(Path(folders[1]))
    args = {"model": {"path": folders[0]}, "kv": {"memory_gib": 0.3}}

    with serve(args, num_replicas=1) as server:

        def change() -> None:
            config = yaml.safe_load(server.config.read_text())
            config["applications"][0]["args"]["model"]["path"] = folders[1]
            server.config.write_text(yaml.safe_dump(config))
            os.kill(server.process.pid, signal.SIGUSR1)

        asyncio.run(trial(server, change))
