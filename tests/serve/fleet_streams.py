"""Streams of every kind at a served fleet, and its engines."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx

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
    """36 streams of every kind."""
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
    for number in range(4):
        body = {"model": model, "stream": True, "max_tokens": 150, "ignore_eos": True}
        body |= {"prompt": [7, number], "temperature": 1.0, "seed": number, "stop": list("aeiou")}
        made.append(("completions", body))
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
