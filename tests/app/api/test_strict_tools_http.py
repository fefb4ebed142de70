"""Calls that are held to the schemas of strict tools, and what a forced call may have before it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from actors.scheduling.request import Frame, Grammar
from actors.stage.grammars.guidance import GuidanceCompiler
from app.api.http.options import ApiOptions
from tests.app.api.conftest import MODEL, Server, StartServer
from tests.app.api.test_reasoning_http import HELLO, OfFamily, of_family, write

__all__ = ["of_family"]
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
ADD = {"name": "add", "parameters": PARAMETERS, "strict": True}
NOW = {"name": "now"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def chat_tool(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": function}


async def ask(server: Server, path: str, tools: list[dict[str, Any]], **fields: Any) -> Any:
    body: dict[str, Any] = {"model": MODEL, **fields}
    if path == "messages":
        body |= {"messages": HELLO, "max_tokens": 99}
        body["tools"] = [
            {"name": tool["name"], "input_schema": tool.get("parameters", {"type": "object"})}
            | ({"strict": tool["strict"]} if "strict" in tool else {})
            for tool in tools
        ]
    elif path == "responses":
        body |= {"input": "Hi", "tools": [{"type": "function", **tool} for tool in tools]}
    else:
        body |= {"messages": HELLO, "tools": list(map(chat_tool, tools))}
    return await server.http.post(f"/v1/{path}", json=body)


def grammar_of(server: Server) -> Grammar | None:
    """Of the last request."""
    return server.engine.seen[-1].sampling.grammar


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_calls_of_strict_tools_are_held_to_their_schemas(
    start_server: StartServer, of_family: OfFamily, path: str
) -> None:
    processor = of_family("qwen3")
    server = await start_server(processor=processor)
    write(server, processor, f"<think>\nHm.\n</think>\n\nSo:{CALL}")
    answer = await ask(server, path, [ADD, NOW])
    assert answer.status_code == 200, answer.text
    assert "add" in answer.text
    grammar = grammar_of(server)
    assert grammar is not None
    assert grammar.frame is not None
    assert (grammar.kind, grammar.frame.reasoning) == ("text", ("<think>", "</think>"))
    (held,) = grammar.frame.held
    schemas = [(call.name, json.loads(call.parts[1].text)) for call in held.calls]
    assert schemas == [("add", PARAMETERS), ("now", {"type": "object"})]
    for tools in ([NOW], [{**ADD, "strict": False}]):
        assert (await ask(server, path, tools)).status_code == 200
        assert grammar_of(server) is None


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_a_strict_tool_that_cannot_be_kept_is_refused(
    start_server: StartServer, of_family: OfFamily, path: str
) -> None:
    server = await start_server(processor=of_family("qwen3"))
    odd = {"name": "odd", "parameters": {"properties": {"a": {"not": {}}}}}
    answer = await ask(server, path, [ADD, {**odd, "strict": True}])
    assert answer.status_code == 400
    assert "'odd'" in answer.json()["error"]["message"]
    assert (await ask(server, path, [ADD, odd])).status_code == 200


async def test_gpt_oss_reasons_and_calls_under_a_grammar(
    start_server: StartServer, of_family: OfFamily
) -> None:
    processor = of_family("gpt_oss")
    server = await start_server(processor=processor)
    write(server, processor, CHANNELS["analysis"] + CHANNELS["call"])
    answer = await ask(server, "chat/completions", [ADD])
    message = answer.json()["choices"][0]["message"]
    assert message["reasoning_content"] == "Q"
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    grammar = grammar_of(server)
    assert grammar is not None
    assert grammar.kind == "text"
    assert (await ask(server, "chat/completions", [NOW])).status_code == 200
    assert grammar_of(server) is None


async def test_a_strict_tool_that_tags_cannot_keep_is_refused(
    start_server: StartServer, of_family: OfFamily
) -> None:
    server = await start_server(processor=of_family("qwen3_coder"))
    assert (await ask(server, "chat/completions", [ADD])).status_code == 200
    grammar = grammar_of(server)
    assert grammar is not None
    assert grammar.kind == "text"
    odd = {"name": "odd", "strict": True}
    for parameters in ({"minProperties": 1}, {"properties": {"a": {"pattern": "("}}}):
        tools = [ADD, {**odd, "parameters": {"type": "object", **parameters}}]
        answer = await ask(server, "chat/completions", tools)
        assert answer.status_code == 400
        assert "'odd'" in answer.json()["error"]["message"]


async def test_llama_may_answer_in_json_that_is_no_call(
    start_server: StartServer, of_family: OfFamily
) -> None:
    processor = of_family("llama_3")
    server = await start_server(processor=processor)
    for written, calls in (
        ('{"city": "Paris"}', 0),
        ('{"name": "add", "parameters": {"a": 1}}', 1),
    ):
        write(server, processor, written)
        answer = await ask(server, "chat/completions", [ADD])
        message = answer.json()["choices"][0]["message"]
        assert len(message.get("tool_calls") or []) == calls
        assert (message["content"] or "") == ("" if calls else written)
        grammar = grammar_of(server)
        assert grammar is not None
        assert grammar.kind == "text"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_calls_in_pythons_syntax_are_held_to_their_schemas(
    start_server: StartServer, of_family: OfFamily, path: str, stream: bool
) -> None:
    processor = of_family("gemma_3")
    server = await start_server(processor=processor)
    write(server, processor, "[add(a=1)]")
    answer = await ask(server, path, [ADD], stream=stream)
    assert answer.status_code == 200, answer.text
    assert _calls(answer, stream) == [("add", {"a": 1})]
    grammar = grammar_of(server)
    assert grammar is not None
    assert grammar.kind == "text"
    odd = {"name": "odd", "parameters": {"properties": {"a": {"not": {}}}}, "strict": True}
    answer = await ask(server, path, [ADD, odd], stream=stream)
    assert answer.status_code == 400
    assert "'odd'" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("family", "num_ways"), [("qwen3", 1), ("glm_4", None)])
async def test_strict_tools_beside_a_format(
    start_server: StartServer, of_family: OfFamily, family: str, num_ways: int | None
) -> None:
    """A call takes the place of the answer where it has an opening mark."""
    server = await start_server(processor=of_family(family))
    wanted = {"type": "json_object"}
    answer = await ask(server, "chat/completions", [ADD], response_format=wanted)
    assert answer.status_code == 200
    grammar = grammar_of(server)
    assert grammar is not None
    assert grammar.kind == "json_object"
    assert (grammar.frame and len(grammar.frame.held)) == num_ways


@pytest.mark.parametrize(
    ("family", "options", "before", "frame"),
    [
        ("r1", {}, "Hm.\n</think>\n\n", Frame(("<think>", "</think>"), is_begun=True)),
        ("qwen3", {}, "<think>\nHm.\n</think>\n\n", Frame(("<think>", "</think>"))),
        ("qwen3", {"chat_template_kwargs": {"enable_thinking": False}}, "", None),
        ("hermes", {}, "", None),
    ],
)
async def test_a_model_reasons_before_a_forced_call(
    start_server: StartServer,
    of_family: OfFamily,
    family: str,
    options: dict[str, Any],
    before: str,
    frame: Frame | None,
) -> None:
    processor = of_family(family)
    server = await start_server(processor=processor)
    write(server, processor, before + '[{"name": "add", "arguments": {"a": 1}}]')
    answer = await ask(server, "chat/completions", [ADD], tool_choice="required", **options)
    (choice,) = answer.json()["choices"]
    message = choice["message"]
    assert message.get("reasoning_content") == ("Hm." if before else None)
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("add", '{"a": 1}')
    assert not message["content"]
    grammar = grammar_of(server)
    assert grammar is not None
    assert (grammar.kind, grammar.frame) == ("json_schema", frame)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_a_call_that_has_to_be_made_is_one_as_the_family_writes_it(
    start_server: StartServer, of_family: OfFamily, path: str, stream: bool
) -> None:
    processor = of_family("gpt_oss")
    server = await start_server(processor=processor)
    named = {"name": "add"} if path == "responses" else {"function": {"name": "add"}}
    choices: tuple[Any, ...] = ("required", {"type": "function", **named})
    if path == "messages":
        choices = ({"type": "any"}, {"type": "tool", "name": "add"})
    for choice, names, most_calls in zip(choices, (["add", "now"], ["add"]), (16, 1), strict=True):
        write(server, processor, CHANNELS["analysis"] + CHANNELS["call"])
        answer = await ask(server, path, [ADD, NOW], tool_choice=choice, stream=stream)
        assert answer.status_code == 200, answer.text
        assert _calls(answer, stream) == [("add", {"a": 1})]
        assert "Q" in answer.text  # what it thinks
        grammar = grammar_of(server)
        assert grammar is not None
        assert grammar.frame is not None
        assert grammar.frame.reasoning == tuple(CHANNELS["analysis"].split("Q"))
        assert grammar.frame.most_calls == most_calls
        (held,) = grammar.frame.held
        assert [call.name for call in held.calls] == names


def _calls(answer: Any, stream: bool) -> list[tuple[str, Any]]:
    """Of an answer in any of the three forms, whole or streamed."""
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    names: list[str] = []
    arguments = ""
    for event in map(json.loads, lines) if stream else [answer.json()]:
        block = event.get("content_block", event.get("item", {}))
        blocks = [*event.get("content", []), *event.get("output", []), block]
        for choice in event.get("choices", []):
            calls = choice.get("message", choice.get("delta"))
            blocks += [call["function"] for call in calls.get("tool_calls") or []]
        if event.get("type", "").endswith(".done"):  # which repeats what came before
            continue
        for one in blocks:
            names += [one["name"]] if one.get("name") else []
            given = one.get("arguments") or one.get("input") or ""
            arguments += given if isinstance(given, str) else json.dumps(given)
        if event.get("type") == "response.function_call_arguments.delta":
            arguments += event["delta"]
        elif isinstance(delta := event.get("delta"), dict):
            arguments += delta.get("partial_json", "")
    (name,) = names
    return [(name, json.loads(arguments))]


FORMAT = {"type": "json_schema", "json_schema": {"name": "sum", "schema": PARAMETERS}}
CHANNELS = {
    "analysis": "<|channel|>analysis<|message|>Q<|end|><|start|>assistant",
    "final": '<|channel|>final<|message|>{"a": 1}',
    "call": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>',
}


@pytest.mark.parametrize("tools", [[], [NOW, {**ADD, "strict": False}], [NOW, ADD]])
async def test_gpt_oss_reasons_and_may_call_before_it_answers_in_a_format(
    start_server: StartServer, of_family: OfFamily, tools: list[dict[str, Any]]
) -> None:
    processor = of_family("gpt_oss")
    server = await start_server(processor=processor)
    for way in ("final", "call") if tools else ("final",):
        write(server, processor, CHANNELS["analysis"] + CHANNELS[way])
        fields = {"response_format": FORMAT, **({} if tools else {"tool_choice": "none"})}
        answer = await ask(server, "chat/completions", tools or [NOW], **fields)
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        assert message["reasoning_content"] == "Q"
        assert (message["content"] or "") == ('{"a": 1}' if way == "final" else "")
        assert len(message.get("tool_calls") or []) == (way == "call")
    grammar = grammar_of(server)
    assert grammar is not None
    texts = [*(bytes([byte]) for byte in range(256)), b""]
    make = GuidanceCompiler(texts, (256,)).compile("json_schema", grammar.text, grammar.frame)
    for text, is_taken in (
        (CHANNELS["final"], True),
        (CHANNELS["analysis"] + CHANNELS["final"], True),
        (CHANNELS["analysis"] + CHANNELS["call"], bool(tools)),
        (CHANNELS["call"].replace("1", '"x"'), bool(tools) and not tools[1]["strict"]),
        ('{"a": 1}', False),
        (CHANNELS["final"].replace("1", '"x"'), False),
        (CHANNELS["analysis"], False),
        (CHANNELS["call"] + CHANNELS["final"], False),
    ):
        matcher = make()
        taken = all(map(matcher.take, text.encode())) and (matcher.is_over or matcher.take(256))
        assert taken is is_taken, text


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_many_tools_of_an_agent_are_no_grammar_that_is_too_long(
    start_server: StartServer, of_family: OfFamily, choice: str
) -> None:
    options = ApiOptions(max_grammar_chars=250)
    server = await start_server(options, processor=of_family("qwen3"))
    tools = [
        {**ADD, "name": f"add_{n}", "parameters": {**PARAMETERS, "description": f"Of numbers {n}."}}
        for n in range(12)
    ]
    for some, status in ((tools[:5], 200), (tools, 400)):
        answer = await ask(server, "chat/completions", some, tool_choice=choice)
        assert answer.status_code == status, answer.text
    assert "(setting api.max_grammar_chars)" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "tools"
