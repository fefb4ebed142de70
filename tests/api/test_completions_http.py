"""`/v1/completions` over real HTTP, against tokens computed by hand."""

from __future__ import annotations

import json

from tests.api.conftest import MODEL, Server


def letters(prompt: str, count: int, index: int = 0) -> str:
    """What HandEngine writes after a prompt of plain ASCII without merges."""
    base = sum(prompt.encode()) + index
    return "".join(chr(97 + (base + i * 7) % 26) for i in range(count))


async def test_whole_answer(server: Server) -> None:
    answer = await server.http.post(
        "/v1/completions", json={"model": MODEL, "prompt": "abc", "max_tokens": 5}
    )
    assert answer.status_code == 200
    body = answer.json()
    assert body["choices"] == [
        {"index": 0, "text": letters("abc", 5), "logprobs": None, "finish_reason": "length"}
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_stream_has_one_event_per_token_and_ends_with_done(server: Server) -> None:
    body = {"prompt": "abc", "max_tokens": 5, "stream": True}
    async with server.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert len(events) == 5
    assert "".join(event["choices"][0]["text"] for event in events) == letters("abc", 5)
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 4 + ["length"]
