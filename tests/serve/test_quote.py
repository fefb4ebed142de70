"""A quote over HTTP, from an engine that has measured its own cost model."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.serve.live_server import LiveServer

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]


def test_a_quote_says_what_the_engine_would(demo: LiveServer) -> None:
    def ask(**body: Any) -> dict[str, Any]:
        given = {"prompt": "What is a stall?", "max_tokens": 8, **body}
        answer = httpx.post(f"{demo.url}/v1/slo/quote", json=given, timeout=30)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    idle = ask()
    assert idle["can_serve_now"] is True
    assert 0 < idle["attainable"]["ttft_ms"] <= idle["predicted"]["ttft_ms"]
    assert idle["predicted"]["ttft_ms"] <= idle["predicted"]["ttft_bound_ms"]
    # Less than what is achievable is refused in the words of the completion.
    least = idle["attainable"]["tbt_ms"]
    assert ask(slo={"tbt_ms": 60_000, "ttft_ms": 60_000})["can_serve_now"] is True
    never = ask(slo={"tbt_ms": least / 3})
    assert (never["can_serve_now"], never["retry_after_s"]) == (False, None)
    body = {"model": "demo", "prompt": "What is a stall?", "slo": {"tbt_ms": least / 3}}
    refused = httpx.post(f"{demo.url}/v1/completions", json=body, timeout=30)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == never["param"] == "slo.tbt_ms"
    assert refused.json()["error"]["message"].split(":")[0] == never["reason"].split(":")[0]
