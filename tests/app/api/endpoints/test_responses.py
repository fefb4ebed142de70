"""`/v1/responses` through the `openai` package."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response

from tests.app.api.conftest import MODEL, Server
from tests.app.api.test_errors_http import check

ADD: Any = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CHOICE: Any = {"type": "function", "name": "add"}
CALL: Any = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}


def write(server: Server, text: str) -> None:
    """Make the engine write this text, byte by byte, and end."""
    end_token = server.engine.card.eos_token_ids[0]
    server.engine.script = lambda request, index: [*text.encode(), end_token]


async def test_response_object(server: Server) -> None:
    write(server, "Hellö")
    answer = await server.openai.responses.create(
        model=MODEL, input="Hi", instructions="Be kind.", temperature=0.5, metadata={"a": "b"}
    )
    assert answer.output_text == "Hellö"
    assert answer.status == "completed"
    assert answer.usage is not None
    assert answer.usage.output_tokens == len("Hellö".encode()) + 1
    type(answer).model_validate_json(answer.to_json(), strict=True)  # nothing of it is missing
    assert (answer.temperature, answer.metadata) == (0.5, {"a": "b"})
    shown = await server.http.post(
        "/detokenize", json={"tokens": list(server.engine.seen[-1].prompt)}
    )
    assert shown.json()["prompt"] == "<|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>"


async def test_answers_are_whole_by_the_clients_own_types(server: Server) -> None:
    """The client builds them unchecked; what a type requires and an answer lacks would be None."""
    asked: list[tuple[str, dict[str, Any]]] = [
        ("Hello", {}),
        ('{"name": "add", "arguments": {}}', {"tools": [ADD], "tool_choice": CHOICE}),
        ("Hello", {"max_output_tokens": 2}),
    ]
    for written, extra in asked:
        write(server, written)
        body = {"model": MODEL, "input": "Hi", **extra}
        answer = await server.http.post("/v1/responses", json=body, timeout=60)
        Response.model_validate_json(answer.text)
        streamed = {**body, "stream": True}
        answer = await server.http.post("/v1/responses", json=streamed, timeout=60)
        *_, last = (line for line in answer.text.splitlines() if line.startswith("data: {"))
        Response.model_validate(json.loads(last.removeprefix("data: "))["response"])


async def test_response_events(server: Server) -> None:
    write(server, "a 猫")
    stream = await server.openai.responses.create(model=MODEL, input="Hi", stream=True)
    events = [event async for event in stream]
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "a 猫"
    last: Any = events[-1]
    assert last.response.output_text == "a 猫"
    assert last.response.usage.total_tokens > 0


async def test_response_cut_short_is_incomplete(server: Server) -> None:
    answer = await server.openai.responses.create(model=MODEL, input="Hi", max_output_tokens=2)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("stream", [False, True])
async def test_response_with_a_function_call(server: Server, stream: bool) -> None:
    write(server, 'Ok.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    request: dict[str, Any] = {"model": MODEL, "input": "Hi", "tools": [ADD]}
    if stream:
        events = [e async for e in await server.openai.responses.create(**request, stream=True)]
        arguments = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
        assert "".join(arguments) == '{"a": 1}'
        answer = events[-1].response
    else:
        answer = await server.openai.responses.create(**request)
    message, call = answer.output
    assert message.content[0].text == "Ok."
    assert (call.type, call.name, call.arguments) == ("function_call", "add", '{"a": 1}')
    write(server, "1")
    again = await server.openai.responses.create(
        model=MODEL,
        tools=[ADD],
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            call.model_dump(exclude_none=True),
            {"type": "function_call_output", "call_id": call.call_id, "output": "1"},
        ],
    )
    assert again.output_text == "1"


async def test_a_call_s_output_may_come_in_parts(server: Server) -> None:
    parts = [{"type": "input_text", "text": text} for text in ("three ", "apples")]
    given: list[Any] = [
        {"role": "user", "content": "Hi"},
        CALL,
        {"type": "function_call_output", "call_id": "c1", "output": parts},
    ]

    async def prompt() -> str:
        await server.openai.responses.create(model=MODEL, input=given, max_output_tokens=1)
        tokens = list(server.engine.seen[-1].prompt)
        return (await server.http.post("/detokenize", json={"tokens": tokens})).json()["prompt"]

    assert "<|tool|>three apples<|end|>" in await prompt()
    parts.insert(0, {"type": "input_image", "image_url": "data:", "detail": "auto"})
    told = "[image left out: the model takes text only]\n"
    assert f"<|tool|>{told}three apples<|end|>" in await prompt()
    parts.append({"type": "input_video"})
    refused = await server.http.post("/v1/responses", json={"model": MODEL, "input": given})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith("input.2.output.3")


async def test_a_required_call_goes_before_the_format_of_the_text(server: Server) -> None:
    """Clients of tools with an output type (instructor, Agents) send both."""
    write(server, '{"name": "add", "arguments": {"a": 1}}')
    form: Any = {"type": "json_schema", "name": "sum", "schema": {"type": "object"}}
    answer = await server.openai.responses.create(
        model=MODEL,
        input="Hi",
        tools=[ADD],
        tool_choice=CHOICE,
        text={"format": form},
    )
    assert [(item.type, item.arguments) for item in answer.output] == [
        ("function_call", '{"a": 1}')
    ]


async def test_only_allowed_tools_are_offered(server: Server) -> None:
    write(server, '[{"name": "add", "arguments": {"a": 1}}]')
    other = {"type": "function", "name": "other"}
    named = {"type": "function", "name": "add"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    body = {"model": MODEL, "input": "Hi", "tools": [other, ADD], "tool_choice": choice}
    answer = await server.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["tool_choice"] == choice
    grammar = server.engine.seen[-1].sampling.grammar
    assert grammar is not None
    assert "other" not in grammar.text


async def test_what_coding_agents_send_by_themselves_is_accepted(server: Server) -> None:
    """And the model sees the functions alone."""
    search = {"type": "web_search", "external_web_access": False, "search_content_types": ["text"]}
    lookup = {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}}
    request: dict[str, Any] = {"model": MODEL, "input": "Hi", "max_output_tokens": 1}
    plain = await server.openai.responses.create(**request, tools=[ADD])
    prompt = server.engine.seen[-1].prompt
    answer = await server.openai.responses.create(
        **request,
        tools=[search, ADD, lookup, {"type": "image_generation", "output_format": "png"}],
        include=["reasoning.encrypted_content"],
        reasoning={"summary": "auto"},
        extra_body={"client_metadata": {"x-codex-installation-id": "1"}, "access_programs": {}},
    )
    assert server.engine.seen[-1].prompt == prompt
    assert [tool.type for tool in answer.tools] == [
        "web_search",
        "function",
        "tool_search",
        "image_generation",
    ]
    assert answer.output_text == plain.output_text
    await server.openai.responses.create(**request)
    prompt = server.engine.seen[-1].prompt
    await server.openai.responses.create(**request, tools=[search], tool_choice="auto")
    assert server.engine.seen[-1].prompt == prompt


async def test_what_newer_clients_send_is_accepted_and_ignored(server: Server) -> None:
    given: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [], "content": [], "id": "rs_1"},
        {"role": "assistant", "content": "Hm."},
        CALL,
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
    ]
    request: dict[str, Any] = {"model": MODEL, "max_output_tokens": 1}
    await server.openai.responses.create(**request, input=given, tools=[ADD])
    prompt = server.engine.seen[-1].prompt
    given[0]["content"][0]["prompt_cache_breakpoint"] = {"mode": "explicit"}
    given[1]["encrypted_content"] = "gAAAAAB"
    given[2]["phase"] = "commentary"
    given[3] = {**CALL, "caller": {"type": "direct"}}
    given[4] |= {"name": "add", "caller": {"type": "direct"}}
    tool = {**ADD, "defer_loading": False, "allowed_callers": ["direct"], "output_schema": {}}
    await server.openai.responses.create(
        **request,
        input=given,
        tools=[tool],
        reasoning={"context": "all_turns", "mode": "standard"},
        prompt_cache_options={"mode": "implicit", "ttl": "30m", "prewarm": False},
    )
    assert server.engine.seen[-1].prompt == prompt


@pytest.mark.parametrize("given", [{}, {"description": None}, {"description": "Sums."}])
async def test_a_namespace_is_told_back_as_openai_types_it(
    server: Server, given: dict[str, Any]
) -> None:
    """With a description, which a request may leave out."""
    group = {"type": "namespace", "name": "sums", "tools": [ADD], **given}
    request = {"model": MODEL, "input": "Hi", "tools": [group], "max_output_tokens": 1}
    told = (await server.http.post("/v1/responses", json=request)).json()
    assert told["tools"][0]["description"] == (given.get("description") or "")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("namespace", "shown"), [("mcp__sums", "mcp__sums__add"), ("sums__", "sums__add")]
)
async def test_functions_of_a_namespace_are_called_by_both_names(
    server: Server, stream: bool, namespace: str, shown: str
) -> None:
    group: dict[str, Any] = {"type": "namespace", "name": namespace, "description": "Sums."}
    group["tools"] = [{**ADD, "defer_loading": True}]
    request: dict[str, Any] = {"model": MODEL, "tools": [ADD, group]}
    write(server, f'<tool_call>{{"name": "{shown}", "arguments": {{"a": 1}}}}</tool_call>')
    if stream:
        events = [
            e
            async for e in await server.openai.responses.create(**request, input="Hi", stream=True)
        ]
        added = [e.item for e in events if e.type == "response.output_item.added"]
        assert [(item.name, item.namespace) for item in added] == [("add", namespace)]
        answer = events[-1].response
    else:
        answer = await server.openai.responses.create(**request, input="Hi")
    (call,) = answer.output
    assert (call.type, call.name, call.namespace) == ("function_call", "add", namespace)
    assert call.arguments == '{"a": 1}'
    assert [tool.type for tool in answer.tools] == ["function", "namespace"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "1"}
    sent = [{"role": "user", "content": "Hi"}, call.model_dump(exclude_none=True), result]
    await server.openai.responses.create(**request, input=sent)
    tokens = list(server.engine.seen[-1].prompt)
    prompt = (await server.http.post("/detokenize", json={"tokens": tokens})).json()["prompt"]
    assert prompt.count(f'{{"name": "{shown}", "arguments": {{"a": 1}}}}') == 1
    assert f'"function": {{"name": "{shown}", ' in prompt


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "local_shell"}, "tools.0.type"),
        (
            {"type": "namespace", "name": "n", "tools": [{"type": "local_shell"}]},
            "tools.0.tools.0.type",
        ),
    ],
)
async def test_a_tool_of_another_type_is_refused_by_its_type(
    server: Server, tool: Any, param: str
) -> None:
    body = {"model": MODEL, "input": "Hi", "tools": [tool]}
    answer = await server.http.post("/v1/responses", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    message = (
        f"Invalid '{param}': the model calls only functions and custom tools here, not a tool of "
        "type 'local_shell'."
    )
    assert (error["param"], error["message"]) == (param, message)


async def test_response_text_format_constrains(server: Server) -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    write(server, "{}")
    await server.openai.responses.create(
        model=MODEL,
        input="Hi",
        text={"format": {"type": "json_schema", "name": "n", "schema": schema}},
    )
    grammar = server.engine.seen[-1].sampling.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference"}]}, "input.0.type"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"tools": [{"type": []}]}, "tools.0.type"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "web_search"}]}]},
            "tools.0.tools.0.type",
        ),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "namespace", "name": "n" * 126, "tools": [ADD]}]}, "tools.0"),
        (
            {"input": [{**CALL, "namespace": "n" * 124, "name": "add"}]},
            "input.0",
        ),
        ({"max_output_tokens": 4096}, "max_output_tokens"),
    ],
)
async def test_responses_refuse_by_name(server: Server, extra: Any, param: str) -> None:
    answer = await server.http.post("/v1/responses", json={"model": MODEL, "input": "Hi", **extra})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert "at most 0" not in error["message"]


@pytest.mark.parametrize(
    ("content", "param", "message"),
    [
        ([], "input", "at least 1 item"),
        ([{"role": "wizard", "content": "Hi"}], "input.0.role", "'assistant'"),
        ([{"role": "user", "content": 5}], "input.0.content", "string"),
        ([{"role": "user"}], "input.0.content", "Missing"),
        ([{"type": "function_call", "name": "f"}], "input.0.call_id", "Missing"),
        (
            [{"role": "user", "content": [{"type": "input_image"}]}],
            "input.0.content.0.type",
            "'input_text'",
        ),
        ([{"type": "nope"}], "input.0.type", "'message'"),
        ([{"type": []}], "input.0.type", "'message'"),
        (["Hi"], "input.0", "an object"),
    ],
)
async def test_errors_of_items_are_of_the_kind_that_is_meant(
    server: Server, content: Any, param: str, message: str
) -> None:
    answer = await server.http.post("/v1/responses", json={"model": MODEL, "input": content})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


LOGPROBS: Any = {"include": ["message.output_text.logprobs"]}


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_the_text(server: Server, stream: bool) -> None:
    write(server, "Hello")
    asked: Any = {"model": MODEL, "input": "Hi", **LOGPROBS, "top_logprobs": 2}
    if stream:
        told, deltas = [], []
        async with server.openai.responses.stream(**asked) as events:
            async for event in events:
                if event.type == "response.output_text.delta":
                    deltas += event.logprobs
                elif event.type == "response.output_text.done":
                    told = event.logprobs
            answer = await events.get_final_response()
        assert "".join(entry.token for entry in deltas) == "Hello"
        assert [entry.logprob for entry in told] == [entry.logprob for entry in deltas]
    else:
        answer = await server.openai.responses.create(**asked)
    (item,) = answer.output
    assert item.type == "message"
    (part,) = item.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert "".join(entry.token for entry in part.logprobs) == "Hello"
    assert {len(entry.top_logprobs) for entry in part.logprobs} == {2}
    assert server.engine.seen[-1].sampling.logprobs == 2
    assert answer.top_logprobs == 2


async def test_log_probabilities_are_of_the_text_alone(server: Server) -> None:
    """Not of a call, whose item has no place for them."""
    write(server, '{"name": "add", "arguments": {}}')
    answer = await server.openai.responses.create(
        model=MODEL, input="Hi", tools=[ADD], tool_choice=CHOICE, **LOGPROBS
    )
    assert [item.type for item in answer.output] == ["function_call"]
    refused = {"model": MODEL, "input": "Hi", "top_logprobs": 19, "max_output_tokens": 2000}
    check(await server.http.post("/v1/responses", json=refused), 400, "top_logprobs")


async def test_a_conversation_that_is_too_long_loses_its_oldest_turns(server: Server) -> None:
    write(server, "Hello")
    turn = [{"role": "user", "content": "u" * 700}, {"role": "assistant", "content": "a" * 700}]
    asked: Any = {
        "model": MODEL, "instructions": "Be kind.", "max_output_tokens": 100,
        "input": [*turn, CALL, {"type": "function_call_output", "call_id": "c1", "output": "2"},
                  *turn, *turn, {"role": "user", "content": "Last"}],
    }  # fmt: skip
    for truncation in ({}, {"truncation": "disabled"}):
        answer = await server.http.post("/v1/responses", json={**asked, **truncation})
        check(answer, 400, "input")
    answer = await server.openai.responses.create(**asked, truncation="auto")
    assert (answer.output_text, answer.truncation) == ("Hello", "auto")
    shown = (
        await server.http.post("/detokenize", json={"tokens": list(server.engine.seen[-1].prompt)})
    ).json()["prompt"]
    assert shown.startswith("<|system|>Be kind.<|end|><|user|>uuu")
    assert shown.endswith("<|user|>Last<|end|><|assistant|>")
    assert shown.count("u" * 700) == 2, "as many turns as there is room for"
