"""Python callers: `serve.run(build_app(...))` and a streaming handle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.main import build_app
from tests.live.reference import MAX_TOKENS, expected, make_prompts

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def handle(own_serve: None, tiny_model: Callable[..., Path]) -> Iterator[Any]:
    from ray import serve

    args = {
        "model": {"path": str(tiny_model("llama"))},
        "scheduling": {"token_budget": 64, "max_requests": 16},
        "kv": {"block_size": 4, "memory_gib": 0.01},
    }
    yield serve.run(build_app(args), name="handle", route_prefix="/handle")
    serve.delete("handle")


def read(handle: Any, prompt: Any, **params: Any) -> list[dict[str, Any]]:
    return list(handle.generate.options(stream=True).remote(prompt, **params))


def test_tokens_equal_transformers(handle: Any) -> None:
    for number in (0, 7, 39):
        events = read(handle, list(make_prompts()[number]), max_tokens=MAX_TOKENS, ignore_eos=True)
        tokens = [t for event in events for t in event["tokens"]]
        assert tokens == expected("llama")[number]
        assert [e["index"] for e in events] == sorted(e["index"] for e in events)
        assert events[-1]["finish_reason"] == "length"


def test_a_stream_goes_on_behind_delivered_tokens(handle: Any) -> None:
    """What a caller does after losing a replica: the same request, and what it already has."""
    prompt, tokens = list(make_prompts()[5]), expected("llama")[5]
    events = read(handle, prompt, max_tokens=MAX_TOKENS, ignore_eos=True, output=tuple(tokens[:6]))
    assert [t for event in events for t in event["tokens"]] == tokens[6:]
    assert events[0]["index"] == 6


def test_text_prompts_and_wrong_parameters(handle: Any) -> None:
    events = read(handle, "hello", max_tokens=4, ignore_eos=True)
    assert sum(len(e["tokens"]) for e in events) == 4
    with pytest.raises(Exception, match="unknown parameter 'max_token'"):
        read(handle, "hello", max_token=4)
    with pytest.raises(Exception, match="prompt: must hold at least one token"):
        read(handle, [])


def test_status_tells_the_engine_is_at_rest(handle: Any) -> None:
    status = handle.status.remote().result(timeout_s=30)
    assert status["num_free_blocks"] == status["num_blocks"]
    assert status["policy"] == "sarathi"
