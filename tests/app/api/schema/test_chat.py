"""Custom tools of a chat, through the `openai` package."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.app.api.conftest import MODEL, Server

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
GRAMMAR: Any = {"syntax": "regex", "definition": "[a-z]+"}
PATCH: Any = {
    "type": "custom",
    "custom": {
        "name": "patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "grammar": GRAMMAR},
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
PATCH_NAME: Any = {"type": "custom", "custom": {"name": "patch"}}
INPUT = 'a\n"b"\\'
KINDS = {"input": "custom", "arguments": "function"}
CALL: Any = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": INPUT}}


def write(server: Server, text: str) -> None:
    """Make the engine write this text, byte by byte, and end."""
    end_token = server.engine.card.eos_token_ids[0]
    server.engine.script = lambda request, index: [*text.encode(), end_token]


def join(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    """Add a part of a streamed call."""
    if "id" in delta:
        assert delta["index"] == len(calls)
        calls.append(delta)
        return
    call = calls[delta["index"]]
    for text in ("input", "arguments"):
        if more := delta.get(KINDS[text], {}).get(text):
            call[KINDS[text]][text] += more


async def prompt_of(server: Server) -> str:
    tokens = list(server.engine.seen[-1].prompt)
    shown = await server.http.post("/detokenize", json={"tokens": tokens})
    return str(shown.json()["prompt"])


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "choice",
    [
        "auto",
        "required",
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [PATCH_NAME, NOW]},
        },
    ],
    ids=["auto", "required", "allowed"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_custom_tool_is_called_with_a_text(
    server: Server, stream: bool, choice: Any, n: int
) -> None:
    calls = [{"name": "patch", "arguments": {"input": INPUT}}, {"name": "now", "arguments": {}}]
    written = [f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls]
    write(server, json.dumps(calls) if choice == "required" else "".join(written))
    request: dict[str, Any] = {"model": MODEL, "messages": HELLO, "tools": [PATCH, NOW], "n": n}
    request["tool_choice"] = choice
    found: list[list[dict[str, Any]]] = [[] for _ in range(n)]
    if stream:
        async for chunk in await server.openai.chat.completions.create(**request, stream=True):
            for one in chunk.choices:
                for delta in one.delta.tool_calls or []:
                    join(found[one.index], delta.to_dict())
    else:
        answer = await server.openai.chat.completions.create(**request)
        type(answer).model_validate_json(answer.to_json(), strict=True)
        found = [[c.to_dict() for c in one.message.tool_calls] for one in answer.choices]
        assert {one.finish_reason for one in answer.choices} == {"tool_calls"}
    for custom, function in found:
        assert custom["type"] == "custom"
        assert custom["custom"] == {"name": "patch", "input": INPUT}
        assert function["type"] == "function"
        assert function["function"] == {"name": "now", "arguments": "{}"}


async def test_a_named_custom_tool_is_forced(server: Server) -> None:
    write(server, json.dumps({"name": "patch", "arguments": {"input": INPUT}}))
    answer = await server.openai.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        tools=[NOW, PATCH],
        tool_choice=PATCH_NAME,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "custom"
    assert (call.custom.name, call.custom.input) == ("patch", INPUT)
    grammar = server.engine.seen[-1].sampling.grammar
    assert grammar is not None
    assert "now" not in grammar.text


async def test_the_model_is_told_of_the_grammar_and_of_earlier_calls(server: Server) -> None:
    result = {"role": "tool", "tool_call_id": "c1", "content": "done"}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [CALL]}, result]
    body = {"model": MODEL, "messages": messages, "tools": [PATCH]}
    answer = await server.http.post("/v1/chat/completions", json={**body, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    prompt = await prompt_of(server)
    assert "Edits files.\\n\\nThe text of `input` matches this regular expression as a" in prompt
    assert json.dumps({"name": "patch", "arguments": {"input": INPUT}}) in prompt
    counted = await server.http.post("/tokenize", json=body)
    assert counted.json()["tokens"] == list(server.engine.seen[-1].prompt)
    quoted = await server.http.post("/v1/slo/quote", json={**body, "max_tokens": 1})
    assert quoted.json()["prompt_tokens"] == counted.json()["count"]


FLAT: Any = {"type": "custom", "name": "patch"}  # as in responses
FLAT_FORMAT: Any = {"name": "a", "format": {"type": "grammar", **GRAMMAR}}


@pytest.mark.parametrize(
    ("extra", "param", "message"),
    [
        ({"tools": [{"type": "custom"}]}, "tools.0.custom", "Missing"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools.0.custom.name", "Missing"),
        ({"tools": [{"type": "other"}]}, "tools.0.type", "be 'function' or 'custom'."),
        ({"tools": [FLAT]}, "tools.0.name", "Unknown parameter: 'tools.0.name'."),
        ({"tools": [{**NOW, "strict": True}]}, "tools.0.strict", "Unknown"),
        (
            {"tools": [{"type": "custom", "custom": FLAT_FORMAT}]},
            "tools.0.custom.format.syntax",
            "Unknown parameter: 'tools.0.custom.format.syntax'.",
        ),
        ({"tools": [PATCH, PATCH]}, "tools", "same name"),
        ({"tools": [NOW], "tool_choice": PATCH_NAME}, "tool_choice", "'patch'"),
        (
            {"messages": [*HELLO, {"role": "assistant", "tool_calls": [{**CALL, "custom": {}}]}]},
            "messages.1.tool_calls.0.custom.name",
            "Missing",
        ),
    ],
)
async def test_what_is_malformed_is_refused_by_name(
    server: Server, extra: Any, param: str, message: str
) -> None:
    body = {"model": MODEL, "messages": HELLO, **extra}
    answer = await server.http.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert message in error["message"]
    assert "Did you mean" not in error["message"]
