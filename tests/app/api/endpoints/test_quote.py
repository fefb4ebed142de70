"""`/v1/slo/quote`: what is asked of the engine, and how its answer is told."""

from __future__ import annotations

from typing import Any

import pytest

from actors.scheduling.interfaces import Quote, QuoteRequest
from actors.scheduling.request import Objective
from tests.app.api.conftest import Server


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ({"prompt_tokens": 300}, 300),
        ({"prompt": [5, 6, 7]}, 3),
        ({"prompt": "the é"}, 3),
        ({"messages": [{"role": "user", "content": "Hi"}]}, None),
    ],
)
async def test_a_quote_asks_for_what_would_be_sent(
    server: Server, given: dict[str, Any], count: int | None
) -> None:
    if count is None:
        found = await server.http.post("/tokenize", json=given)
        count = found.json()["count"]
    slo = {"tbt_ms": 50, "ttft_ms": 700}
    body = {**given, "max_tokens": 5000, "slo": slo, "user": "ann", "priority": -3}
    answer = (await server.http.post("/v1/slo/quote", json=body)).json()
    room = 4096 - count
    assert server.engine.asked == [QuoteRequest(count, room, Objective(0.05, 0.7), "ann", -3)]
    assert (answer["prompt_tokens"], answer["max_tokens"]) == (count, room)
    assert (answer["can_serve_now"], answer["predicted"], answer["reason"]) == (True, None, None)


async def test_a_quote_is_told_in_milliseconds(server: Server) -> None:
    server.engine.quoted = Quote(False, 0.5, 0.6, 0.04, 0.02, 0.01, 1.25, "busy", "slo.ttft_ms")
    body = {"prompt_tokens": 10, "max_tokens": 4}
    answer = (await server.http.post("/v1/slo/quote", json=body)).json()
    assert answer["can_serve_now"] is False
    assert answer["predicted"] == {"ttft_ms": 500, "ttft_bound_ms": 600, "tbt_bound_ms": 40}
    assert answer["attainable"] == {"ttft_ms": 20, "tbt_ms": 10}
    assert (answer["retry_after_s"], answer["reason"], answer["param"]) == (
        1.25, "busy", "slo.ttft_ms",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({}, "prompt_tokens"),
        ({"prompt_tokens": 3, "prompt": "a"}, "prompt_tokens"),
        ({"prompt_tokens": 3, "tools": []}, "tools"),
        ({"prompt_tokens": 4096}, "prompt_tokens"),
        ({"prompt_tokens": 3, "priority": 1}, "priority"),
        ({"prompt_tokens": 3, "slo": {"tbt_ms": 0}}, "slo.tbt_ms"),
    ],
)
async def test_a_quote_refuses_by_name(server: Server, wrong: Any, param: str) -> None:
    answer = await server.http.post("/v1/slo/quote", json={"max_tokens": 4, **wrong})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
