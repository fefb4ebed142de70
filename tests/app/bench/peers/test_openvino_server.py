"""The server around OpenVINO's pipeline, which is not installed here: a pipeline made by hand."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from app.bench.peers.openvino_server import Stream, application, step_forever


class Handle:
    """Of one request: after step n it has n tokens to read, until it has them all."""

    def __init__(self, stream: Stream) -> None:
        self._tokens = list(range(stream.body["max_tokens"]))
        self._ready = list[list[int]]()
        self._width = 0
        self.breaks = not stream.body["prompt"]

    def step(self) -> None:
        self._width += 1
        given, self._tokens = self._tokens[: self._width], self._tokens[self._width :]
        self._ready.append(given)

    def can_read(self) -> bool:
        return bool(self._ready)

    def read(self) -> dict[int, Any]:
        return {0: SimpleNamespace(generated_ids=self._ready.pop(0))}

    def get_status(self) -> Any:
        return SimpleNamespace(name="RUNNING" if self._tokens else "FINISHED")


class Pipeline:
    def __init__(self) -> None:
        self.handles = list[Handle]()

    def add(self, number: int, stream: Stream) -> Handle:
        if len(stream.body["prompt"]) > 8:
            raise RuntimeError("the prompt is too long")
        self.handles.append(Handle(stream))
        return self.handles[-1]

    def step(self) -> None:
        if any(handle.breaks for handle in self.handles):
            self.handles.clear()
            raise RuntimeError("no memory")
        for handle in self.handles:
            if handle.get_status().name == "RUNNING":
                handle.step()


@pytest.fixture
def client() -> Iterator[httpx.AsyncClient]:
    arrivals: queue.Queue[Stream | None] = queue.Queue()
    pipeline = Pipeline()
    thread = threading.Thread(target=step_forever, args=(pipeline, arrivals, pipeline.add))
    thread.start()
    transport = httpx.ASGITransport(app=application(arrivals))
    yield httpx.AsyncClient(transport=transport, base_url="http://h")
    arrivals.put(None)
    thread.join()


async def events(client: httpx.AsyncClient, prompt: list[int], num_tokens: int) -> list[Any]:
    body = {"model": "m", "prompt": prompt, "max_tokens": num_tokens}
    answer = await client.post("/v1/completions", json=body)
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_tokens_are_streamed_as_they_come(client: httpx.AsyncClient) -> None:
    *texts, usage = await events(client, [5, 6], 5)
    assert [event["choices"][0]["text"] for event in texts] == [" 0", " 1 2", " 3 4"]
    assert usage == {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 5}}


async def test_a_request_after_an_idle_time_is_served(client: httpx.AsyncClient) -> None:
    first = await events(client, [5], 3)
    assert await events(client, [5], 3) == first


async def test_a_refused_request_stops_no_other(client: httpx.AsyncClient) -> None:
    assert await events(client, [1] * 9, 3) == [{"error": {"message": "the prompt is too long"}}]
    assert len(await events(client, [1], 3)) == 3


async def test_the_model_is_listed(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/models")).json()["data"] == [{"id": "m"}]


async def test_a_step_that_fails_ends_its_requests_and_no_others(client: httpx.AsyncClient) -> None:
    assert await events(client, [], 4) == [{"error": {"message": "no memory"}}]
    assert len(await events(client, [1, 2], 3)) > 1
