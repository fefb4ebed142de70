"""The usage of answers in every form, and nothing that only looks like it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.api.batches.usage import BatchUsage

CHAT: dict[str, Any] = {
    "prompt_tokens": 5,
    "completion_tokens": 7,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 3},
}
RESPONSE: dict[str, Any] = {
    "input_tokens": 5,
    "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
    "output_tokens": 7,
    "output_tokens_details": {"reasoning_tokens": 3},
    "total_tokens": 12,
}
TEXT = 'Say "usage": {"prompt_tokens": 900} \\"usage": {"a": 1} é' + "x" * 5000


@pytest.mark.parametrize(
    "content",
    [
        {"usage": CHAT, "choices": [{"message": {"content": TEXT}}]},
        {"tools": [{"usage": {"prompt_tokens": 900}}], "output": [TEXT], "usage": RESPONSE},
        {"output": [TEXT], "usage": RESPONSE, "after": "é" * 1990},
    ],
)
def test_the_answers_own_usage_is_added(content: dict[str, Any]) -> None:
    usage = BatchUsage()
    for _ in range(2):
        usage.add(json.dumps(content).encode())
    assert usage.shown() == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 8},
        "output_tokens": 14,
        "output_tokens_details": {"reasoning_tokens": 6},
        "total_tokens": 24,
    }


@pytest.mark.parametrize("content", [b"{}", b'{"usage": null}', b'{"usage": {}}'])
def test_what_tells_of_none_adds_none(content: bytes) -> None:
    usage = BatchUsage()
    usage.add(content)
    assert usage == BatchUsage()


def test_embeddings_have_input_alone() -> None:
    usage = BatchUsage()
    usage.add(b'{"data": [], "usage": {"prompt_tokens": 9, "total_tokens": 9}}')
    assert (usage.num_input, usage.num_output) == (9, 0)
