"""Custom tools of `/v1/responses`, as Codex declares apply_patch, through the `openai` package."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest

from app.api.schema.response_tools import NamespaceTool
from tests.app.api.conftest import MODEL, Server

GRAMMAR = 'start: "*** Begin Patch" LF "*** End Patch"\n%import common.LF'
PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files. Do not wrap the patch in JSON.",
    "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
}
NOW: Any = {"type": "function", "name": "now"}
INPUT = '*** Begin Patch\n+print("\U0001f600")\\\n*** End Patch\n'


def write(server: Server, text: str) -> None:
    """Make the engine write this text, byte by byte, and end."""
    end_token = server.engine.card.eos_token_ids[0]
    server.engine.script = lambda request, index: [*text.encode(), end_token]


def call_of(name: str, arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def prompt_of(server: Server) -> str:
    tokens = list(server.engine.seen[-1].prompt)
    shown = await server.http.post("/detokenize", json={"tokens": tokens})
    return str(shown.json()["prompt"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", {"type": "custom", "name": "apply_patch"}])
async def test_a_custom_tool_is_called_with_a_text(
    server: Server, stream: bool, choice: Any
) -> None:
    request: dict[str, Any] = {"model": MODEL, "input": "Hi", "tools": [PATCH, NOW]}
    request["tool_choice"] = choice
    if choice == "auto":
        write(server, f"Ok.{call_of('apply_patch', {'input': INPUT})}{call_of('now', {})}")
    else:
        write(server, json.dumps({"name": "apply_patch", "arguments": {"input": INPUT}}))
    if stream:
        events = [e async for e in await server.openai.responses.create(**request, stream=True)]
        deltas = [e for e in events if e.type == "response.custom_tool_call_input.delta"]
        (done,) = (e for e in events if e.type == "response.custom_tool_call_input.done")
        assert "".join(e.delta for e in deltas) == INPUT == done.input
        added = [e for e in events if e.type == "response.output_item.added"]
        (item,) = (e for e in added if e.item.type == "custom_tool_call")
        assert {e.item_id for e in deltas} == {item.item.id} == {done.item_id}
        assert {e.output_index for e in deltas} == {item.output_index} == {done.output_index}
        assert (item.item.name, item.item.input) == ("apply_patch", "")
        for event in (deltas[0], done, item):
            type(event).model_validate_json(event.to_json(), strict=True)
        answer = events[-1].response
    else:
        answer = await server.openai.responses.create(**request)
    type(answer).model_validate_json(answer.to_json(), strict=True)
    kinds = [item.type for item in answer.output]
    assert kinds == (
        ["message", "custom_tool_call", "function_call"]
        if choice == "auto"
        else ["custom_tool_call"]
    )
    (call,) = (item for item in answer.output if item.type == "custom_tool_call")
    assert (call.name, call.input) == ("apply_patch", INPUT)
    assert answer.tools[0].to_dict() == PATCH


async def test_the_model_sees_a_function_of_one_text_and_the_grammar(server: Server) -> None:
    request: dict[str, Any] = {"model": MODEL, "input": "Hi", "max_output_tokens": 1}
    await server.openai.responses.create(**request, tools=[PATCH])
    prompt = await prompt_of(server)
    told = f"{PATCH['description']}\n\nThe text of `input` follows this Lark grammar:\n{GRAMMAR}"
    assert json.dumps(told)[1:-1] in prompt
    assert '"required": ["input"]' in prompt
    for form in (None, {"type": "text"}):
        plain: Any = {"type": "custom", "name": "apply_patch", "format": form}
        await server.openai.responses.create(**request, tools=[plain])
        assert "grammar" not in await prompt_of(server)
    regex: Any = {"type": "grammar", "syntax": "regex", "definition": "[0-9]{5}"}
    await server.openai.responses.create(**request, tools=[PATCH | {"format": regex}])
    assert "regular expression as a whole:\\n[0-9]{5}" in await prompt_of(server)


@pytest.mark.parametrize("namespace", [None, "files"])
async def test_a_call_comes_back_as_the_model_has_written_it(
    server: Server, namespace: str | None
) -> None:
    tools: Any = [PATCH]
    shown = "apply_patch"
    if namespace is not None:
        tools = [{"type": "namespace", "name": namespace, "description": "", "tools": [PATCH]}]
        shown = "files__apply_patch"
    request: dict[str, Any] = {"model": MODEL, "tools": tools}
    write(server, call_of(shown, {"input": INPUT}))
    answer = await server.openai.responses.create(**request, input="Hi")
    (call,) = answer.output
    assert call.type == "custom_tool_call"
    assert (call.name, call.namespace, call.input) == ("apply_patch", namespace, INPUT)
    text = [{"type": "input_text", "text": "done"}]
    for output in ("done", text):
        result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": output}
        sent: list[Any] = [{"role": "user", "content": "Hi"}, call.to_dict(), result]
        await server.openai.responses.create(**request, input=sent, max_output_tokens=1)
        prompt = await prompt_of(server)
        arguments = {"input": INPUT}
        written = json.dumps({"name": shown, "arguments": arguments}, ensure_ascii=False)
        assert prompt.count(written) == 1
        assert "<|tool|>done<|end|>" in prompt


async def test_a_call_that_breaks_off_is_incomplete(server: Server) -> None:
    write(server, '{"name": "apply_patch", "arguments": {"input": "*** Begin')
    answer = await server.openai.responses.create(
        model=MODEL, input="Hi", tools=[PATCH], tool_choice="required", max_output_tokens=40
    )
    (call,) = answer.output
    assert call.type == "custom_tool_call"
    assert INPUT.startswith(call.input)
    assert (answer.status, call.to_dict()["status"]) == ("incomplete", "incomplete")


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "custom"}, "tools.0.name"),
        ({"type": "custom", "name": "a b"}, "tools.0.name"),
        ({**PATCH, "format": {"type": "json"}}, "tools.0.format.type"),
        ({**PATCH, "format": {"type": "grammar", "syntax": "lark"}}, "tools.0.format.definition"),
        ({**PATCH, "format": {**PATCH["format"], "syntax": "gbnf"}}, "tools.0.format.syntax"),
        ({**PATCH, "parameters": {}}, "tools.0.parameters"),
    ],
)
async def test_a_malformed_custom_tool_is_refused_by_name(
    server: Server, tool: Any, param: str
) -> None:
    body = {"model": MODEL, "input": "Hi", "tools": [tool]}
    answer = await server.http.post("/v1/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_names_are_unique_among_functions_and_custom_tools(server: Server) -> None:
    tools = [PATCH, {"type": "function", "name": "apply_patch"}]
    body = {"model": MODEL, "input": "Hi", "tools": tools}
    answer = await server.http.post("/v1/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


def test_a_namespace_is_repeated_as_it_was_given() -> None:
    given = {"type": "namespace", "name": "files", "tools": [NOW, PATCH]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        repeated = NamespaceTool.model_validate(given).model_dump(exclude_none=True)
    assert repeated == {**given, "description": ""}
