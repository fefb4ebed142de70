"""Chat completions through the `openai` package and over bare HTTP."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import openai
import pytest
from openai.types import EmbeddingCreateParams
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from pydantic import BaseModel

from app.api.http.options import ApiOptions
from app.api.schema.chat import ChatRequest
from app.api.schema.completions import CompletionRequest
from app.api.schema.other import EmbeddingRequest
from app.text.processor import TextProcessor
from tests.app.api.conftest import MODEL, Server, StartServer

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/number"}},
            "$defs": {"number": {"type": "integer"}},
        },
    },
}


def write(server: Server, text: str, *, end: bool = True) -> None:
    """Make the engine write this text, byte by byte."""
    end_token = server.engine.card.eos_token_ids[0]
    server.engine.script = lambda request, index: [*text.encode(), *([end_token] if end else [])]


async def test_whole_answer(server: Server) -> None:
    write(server, "Hellö!")
    answer = await server.openai.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.choices[0].message.content == "Hellö!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("Hellö!".encode()) + 1
    assert answer.usage.prompt_tokens == len("Hi") + 3  # role, end and the answer's role


async def test_stream_never_splits_a_character(server: Server) -> None:
    text = "naïve 猫 😀 end"
    write(server, text)
    stream = await server.openai.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(text.encode()) + 1


@pytest.mark.parametrize("extra", [{}, {"tools": [ADD]}, {"logprobs": True}], ids=str)
async def test_each_event_has_the_usage_so_far_when_asked_for(server: Server, extra: Any) -> None:
    write(server, "abcd")
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await server.openai.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options=options, **extra
    )
    chunks = [chunk async for chunk in stream]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert pieces == ["", *"abcd", ""]  # the role, and the end
    usages: list[Any] = [chunk.usage for chunk in chunks]
    assert [usage.completion_tokens for usage in usages] == [1, 1, 2, 3, 4, 5, 5]
    assert {usage.prompt_tokens for usage in usages} == {usages[-1].prompt_tokens}


async def test_every_sampling_parameter_reaches_the_engine(server: Server) -> None:
    await server.openai.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_completion_tokens=3,
        temperature=0.5,
        top_p=0.25,
        presence_penalty=-1.5,
        frequency_penalty=1.0,
        seed=42,
        n=2,
        logit_bias={"97": 3, "98": -100},
        user="alice",
        extra_body={
            "top_k": 5,
            "min_p": 0.125,
            "repetition_penalty": 1.25,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [100],
            "priority": 3,
            "slo": {"tbt_ms": 100, "ttft_ms": 2500.0},
        },
    )
    request = server.engine.seen[-1]
    sampling = request.sampling
    assert (request.n, request.tenant, request.priority) == (2, "alice", 3)
    assert (request.objective.tbt_s, request.objective.ttft_s) == (0.1, 2.5)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (3, 2, 42)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 5)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.125, 1.25)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1.5, 1.0)
    assert sampling.stop_token_ids == (100,)
    assert sampling.logit_bias == ((97, 3.0), (98, -100.0))


@pytest.mark.parametrize(
    ("params", "schema"),
    [
        (chat_params.CompletionCreateParamsBase, ChatRequest),
        (completion_params.CompletionCreateParamsBase, CompletionRequest),
        (EmbeddingCreateParams, EmbeddingRequest),
    ],
)
def test_every_parameter_of_openai_s_client_is_known(params: Any, schema: type[BaseModel]) -> None:
    """Those always refused, too: null is accepted, and the refusal says why."""
    assert get_type_hints(params).keys() <= schema.model_fields.keys()


async def test_openai_s_settings_of_its_cache_change_nothing(server: Server) -> None:
    mark: Any = {"mode": "explicit"}
    text: Any = {"type": "text", "text": "Hi", "prompt_cache_breakpoint": mark}
    for content, options in (("Hi", {}), ([text], {"prompt_cache_options": {"ttl": "30m"}})):
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **options}
        answered = await server.http.post("/v1/chat/completions", json={**body, "max_tokens": 1})
        assert answered.status_code == 200, answered.text
    assert len({request.prompt for request in server.engine.seen}) == 1


async def test_unseeded_requests_differ_and_temperature_is_one(server: Server) -> None:
    for _ in range(2):
        await server.openai.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
    first, second = server.engine.seen
    assert first.sampling.temperature == 1.0
    assert first.sampling.seed != second.sampling.seed


async def test_what_a_request_does_not_say_is_sampled_as_the_model_recommends(
    server: Server, text: TextProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    recommended = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    monkeypatch.setattr(text, "sampling_defaults", recommended)
    for given, wanted in (
        ({}, (0.7, 0.8, 20, 1.05)),
        ({"temperature": 1.0, "top_k": 0, "repetition_penalty": 1.0}, (1.0, 0.8, 0, 1.0)),
        ({"temperature": 0.0}, (0.0, 1.0, 0, 1.05)),
    ):
        body = {"model": MODEL, "messages": HELLO, "max_tokens": 1, **given}
        assert (await server.http.post("/v1/chat/completions", json=body)).status_code == 200
        found = server.engine.seen[-1].sampling
        sampled = (found.temperature, found.top_p, found.top_k, found.repetition_penalty)
        assert sampled == wanted
    body = {"model": MODEL, "input": "Hi", "max_output_tokens": 1, "top_p": 0.5}
    answer = (await server.http.post("/v1/responses", json=body)).json()
    assert (answer["temperature"], answer["top_p"]) == (0.7, 0.5)


async def test_stop_string_across_tokens(server: Server) -> None:
    write(server, "one STOP two")
    stream = await server.openai.chat.completions.create(
        model=MODEL, messages=HELLO, stop=["STOP"], stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one "
    assert chunks[-1].choices[0].finish_reason == "stop"
    await server.engine.all_idle.wait()
    assert len(server.engine.closed) == 1  # the rest was never generated


async def test_stop_string_of_one_of_two_ends_only_that_one(server: Server) -> None:
    end = server.engine.card.eos_token_ids[0]
    texts = ["abXcd", "abcde"]
    server.engine.script = lambda request, index: [*texts[index].encode(), end]
    answer = await server.openai.chat.completions.create(model=MODEL, messages=HELLO, stop="X", n=2)
    assert [choice.message.content for choice in answer.choices] == ["ab", "abcde"]
    assert [index for _, index in server.engine.ended_early] == [0]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3 + 6


@pytest.mark.parametrize("param", ["max_tokens", "max_completion_tokens"])
async def test_more_tokens_than_the_context_leaves_are_refused(server: Server, param: str) -> None:
    room = 4096 - (len("Hi") + 3)
    body = {"model": MODEL, "messages": HELLO, param: room + 1}
    refused = await server.http.post("/v1/chat/completions", json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, param)
    assert "requested 4097 tokens" in error["message"]
    for given in ({param: room}, {}):
        body = {"model": MODEL, "messages": HELLO, **given}
        answered = await server.http.post("/v1/chat/completions", json=body)
        assert answered.status_code == 200
        assert server.engine.seen[-1].sampling.max_tokens == room


async def test_without_max_tokens_an_answer_ends_where_its_logprobs_would_be_too_many(
    start_server: StartServer,
) -> None:
    server = await start_server(ApiOptions(max_logprob_entries=60))
    answer = await server.openai.chat.completions.create(
        model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2, n=2
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * 10
    for choice in answer.choices:
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        assert [len(e.top_logprobs) for e in choice.logprobs.content or []] == [2] * 10


async def test_logprobs(server: Server) -> None:
    write(server, "aé", end=False)
    answer = await server.openai.chat.completions.create(
        model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2, max_tokens=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert [entry.bytes for entry in logprobs.content] == [[97], [0xC3], [0xA9]]
    assert logprobs.content[0].logprob == -(97 % 8) / 4 - 0.25
    assert [top.token for top in logprobs.content[0].top_logprobs] == ["a", "`"]


@pytest.mark.parametrize("stream", [False, True])
async def test_tagged_tool_call(server: Server, stream: bool) -> None:
    call = '{"name": "add", "arguments": {"a": 1}}'
    write(server, f"Wait.<tool_call>\n{call}\n</tool_call>")
    request: dict[str, Any] = {"model": MODEL, "messages": HELLO, "tools": [ADD]}
    if not stream:
        answer = await server.openai.chat.completions.create(**request)
        choice = answer.choices[0]
        assert choice.message.content == "Wait."
        assert choice.finish_reason == "tool_calls"
        found: Any = (choice.message.tool_calls or [])[0]
        assert (found.function.name, found.function.arguments) == ("add", '{"a": 1}')
        return
    async with server.openai.chat.completions.stream(**request) as events:
        completion = await events.get_final_completion()
    message = completion.choices[0].message
    assert message.content == "Wait."
    assert completion.choices[0].finish_reason == "tool_calls"
    call_found: Any = (message.tool_calls or [])[0]
    assert call_found.id.startswith("call")
    assert call_found.function.arguments == '{"a": 1}'


@pytest.mark.parametrize(
    ("written", "stop"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1, "b": }}</tool_call>', None),
        ('<tool_call>{"name": "add", "arguments": {"a": 1, "b": "END"}}</tool_call>', "END"),
    ],
)
async def test_a_streamed_call_that_lacks_arguments_is_not_one_to_run(
    server: Server, written: str, stop: str | None
) -> None:
    """As the same answer, not streamed, is text; in each of the three forms of a chat."""
    write(server, written)
    body: dict[str, Any] = {"model": MODEL, "stream": True, "max_tokens": 99}
    stops: Any = {} if stop is None else {"stop": stop}
    lines = (
        await server.http.post(
            "/v1/chat/completions", json={**body, **stops, "messages": HELLO, "tools": [ADD]}
        )
    ).text
    assert '"arguments":"{\\"a\\": 1"' in lines
    assert '"finish_reason":"stop"' in lines
    assert '"finish_reason":"tool_calls"' not in lines

    function = ADD["function"]
    tool: Any = {"name": "add", "input_schema": function["parameters"]}
    stops = {} if stop is None else {"stop_sequences": [stop]}
    lines = (
        await server.http.post(
            "/v1/messages", json={**body, **stops, "messages": HELLO, "tools": [tool]}
        )
    ).text
    assert ("end_turn" if stop is None else "stop_sequence") in lines
    assert '"stop_reason":"tool_use"' not in lines

    if stop is None:  # /v1/responses has no stop strings
        del body["max_tokens"]
        tool = {"type": "function", **function}
        lines = (
            await server.http.post("/v1/responses", json={**body, "input": "Hi", "tools": [tool]})
        ).text
        events = [json.loads(line[6:]) for line in lines.splitlines() if line[:7] == "data: {"]
        (call,) = [one for one in events[-1]["response"]["output"] if one["type"] != "message"]
        assert (call["status"], call["arguments"]) == ("incomplete", '{"a": 1}')
        assert events[-1]["type"] == "response.completed"


@pytest.mark.parametrize(
    ("choice", "written", "kind"),
    [
        ("required", '[{"name": "add", "arguments": {"a": 1}}]', "array"),
        (
            {"type": "function", "function": {"name": "add"}},
            '{"name": "add", "arguments": {"a": 1}}',
            "object",
        ),
    ],
)
async def test_forced_tool_call_is_constrained(
    server: Server, choice: Any, written: str, kind: str
) -> None:
    write(server, written)
    answer = await server.openai.chat.completions.create(
        model=MODEL, messages=HELLO, tools=[ADD], tool_choice=choice
    )
    grammar = server.engine.seen[-1].sampling.grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"
    schema = json.loads(grammar.text)
    assert schema["type"] == kind
    call = schema["items"] if kind == "array" else schema
    assert call["properties"]["arguments"]["properties"]["a"] == {"$ref": "#/$defs/add.number"}
    assert schema["$defs"] == {"add.number": {"type": "integer"}}
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None


@pytest.mark.parametrize(
    ("extra", "status"),
    [
        ({"response_format": {"type": "json_object"}}, 200),
        ({"response_format": {"type": "regex", "pattern": "a+"}}, 200),
        ({"guided_regex": "a+"}, 400),
        ({"structured_outputs": {"choice": ["a"]}}, 400),
    ],
)
async def test_a_forced_call_goes_before_the_format_of_the_text(
    server: Server, extra: Any, status: int
) -> None:
    write(server, '[{"name": "add", "arguments": {"a": 1}}]')
    body = {"model": MODEL, "messages": HELLO, "tools": [ADD], "tool_choice": "required"}
    body |= extra
    answer = await server.http.post("/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == status
    if status == 200:
        assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_within_a_forced_call_is_the_reason(
    server: Server, stream: bool
) -> None:
    write(server, '[{"name": "add", "arguments": {"a": 1, "b": "END"}}]')
    body = {"model": MODEL, "messages": HELLO, "tools": [ADD], "stop": "END", "stream": stream}
    answer = await server.http.post(
        "/v1/chat/completions", json={**body, "tool_choice": "required"}
    )
    written = answer.text.replace(" ", "")
    assert '"finish_reason":"stop"' in written
    assert '"finish_reason":"tool_calls"' not in written


async def test_parameters_that_refer_to_themselves_mean_the_tools_own(server: Server) -> None:
    write(server, '[{"name": "add", "arguments": {}}]')
    properties = {"next": {"$ref": "#"}, "last": {"$ref": "#/properties/next"}}
    parameters = {"type": "object", "properties": properties}
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    await server.openai.chat.completions.create(
        model=MODEL, messages=HELLO, tools=[tool], tool_choice="required"
    )
    grammar = server.engine.seen[-1].sampling.grammar
    assert grammar is not None
    schema = json.loads(grammar.text)
    assert schema["items"]["properties"]["arguments"] == {"$ref": "#/$defs/add"}
    assert schema["$defs"]["add"]["properties"] == {
        "next": {"$ref": "#/$defs/add"},
        "last": {"$ref": "#/$defs/add/properties/next"},
    }


@pytest.mark.parametrize("key", ["$defs", "definitions"])
@pytest.mark.parametrize("wrong", [[1], "x", 1])
async def test_definitions_that_are_no_object_are_refused(
    server: Server, key: str, wrong: Any
) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {key: wrong}}}
    body = {"model": MODEL, "messages": HELLO, "tools": [tool], "tool_choice": "required"}
    refused = await server.http.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
    assert f"tool 'add': '{key}' is no object" in refused.json()["error"]["message"]


async def test_definitions_of_many_tools_keep_apart(server: Server) -> None:
    write(server, '[{"name": "t0", "arguments": {}}]')
    tools: list[Any] = []
    for number in range(3):
        parameters = {"$defs": {"n": {"const": number}}, "properties": {"a": {"$ref": "#/$defs/n"}}}
        if number == 1:
            parameters["$defs"]["again"] = {"$ref": "#"}
        function = {"name": f"t{number}", "parameters": parameters}
        tools.append({"type": "function", "function": function})
    await server.openai.chat.completions.create(
        model=MODEL, messages=HELLO, tools=tools, tool_choice="required"
    )
    grammar = server.engine.seen[-1].sampling.grammar
    assert grammar is not None
    schema = json.loads(grammar.text)
    assert schema["$defs"] == {
        "t0.n": {"const": 0},
        "t1.n": {"const": 1},
        "t1.again": {"$ref": "#/$defs/t1"},
        "t1": {"type": "object", "properties": {"a": {"$ref": "#/$defs/t1.n"}}},
        "t2.n": {"const": 2},
    }


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_allowed_tools_are_offered(server: Server, mode: str) -> None:
    write(server, '[{"name": "add", "arguments": {"a": 1}}]')
    other = {"type": "function", "function": {"name": "other"}}
    named = {"type": "function", "function": {"name": "add"}}
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
    body = {"model": MODEL, "messages": HELLO, "tools": [other, ADD], "tool_choice": choice}
    answer = await server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    seen = server.engine.seen[-1]
    shown = await server.http.post("/detokenize", json={"tokens": list(seen.prompt)})
    assert '"other"' not in shown.json()["prompt"]
    assert (seen.sampling.grammar is not None) == (mode == "required")
    if seen.sampling.grammar is not None:
        assert "other" not in seen.sampling.grammar.text
    named["function"] = {"name": "zz"}
    refused = await server.http.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert "'zz', which is not among the tools" in refused.json()["error"]["message"]


async def test_tool_results_go_back_through_the_template(server: Server) -> None:
    write(server, "3")
    await server.openai.chat.completions.create(
        model=MODEL,
        messages=[
            *HELLO,
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "add", "arguments": '{"a": 1}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
        ],
        tools=[ADD],
    )
    prompt = server.engine.seen[-1].prompt
    shown = (await server.http.post("/detokenize", json={"tokens": list(prompt)})).json()["prompt"]
    assert '{"name": "add", "arguments": {"a": 1}}<|end|><|tool|>3<|end|>' in shown


@pytest.mark.parametrize(
    ("escaped", "shown"),
    [("\\ud83d", '"{\\"a\\": \\"\\\\ud83d\\"}"'), ("\\ud83d\\ude00", '{"a": "😀"}')],
)
async def test_half_a_character_in_a_call_s_arguments_stays_escaped(
    server: Server, escaped: str, shown: str
) -> None:
    """As a model may write them."""
    function = {"name": "add", "arguments": f'{{"a": "{escaped}"}}'}
    call = {"id": "c1", "type": "function", "function": function}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}]
    body = {"model": MODEL, "messages": messages}
    assert (await server.http.post("/v1/chat/completions", json=body)).status_code == 200
    tokens = list(server.engine.seen[-1].prompt)
    prompt = (await server.http.post("/detokenize", json={"tokens": tokens})).json()["prompt"]
    assert f'"arguments": {shown}' in prompt


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        ({"content": None}, ""),
        ({"content": None, "reasoning_content": "Hm"}, ""),
        ({"reasoning_content": "Hm"}, ""),
        ({"content": None, "refusal": "No."}, "No."),
        ({"refusal": "No."}, "No."),
    ],
)
async def test_an_answer_without_content_goes_back(server: Server, answer: Any, shown: str) -> None:
    write(server, "Yes")
    messages = [*HELLO, {"role": "assistant", **answer}, *HELLO]
    body = {"model": MODEL, "messages": messages}
    answered = await server.http.post("/v1/chat/completions", json=body)
    assert answered.status_code == 200, answered.text
    tokens = list(server.engine.seen[-1].prompt)
    prompt = (await server.http.post("/detokenize", json={"tokens": tokens})).json()["prompt"]
    assert f"<|assistant|>{shown}<|end|>" in prompt


async def test_a_message_may_say_its_type(server: Server) -> None:
    """As lm-eval's messages and those of /v1/responses do; no template reads it."""
    for kind in (None, "text", "message"):
        body = {"model": MODEL, "messages": [{**HELLO[0], "type": kind}], "max_tokens": 1}
        answered = await server.http.post("/v1/chat/completions", json=body)
        assert answered.status_code == 200, answered.text
    assert len({request.prompt for request in server.engine.seen}) == 1
    wrong = {"model": MODEL, "messages": [{**HELLO[0], "type": "image"}]}
    refused = await server.http.post("/v1/chat/completions", json=wrong)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages.0.type")


class Sum(BaseModel):
    a: int


@pytest.mark.filterwarnings("ignore:Pydantic serializer")
async def test_an_answer_that_the_client_has_parsed_goes_back(server: Server) -> None:
    completions = server.openai.chat.completions
    write(server, '{"a": 1}')
    parsed = await completions.parse(model=MODEL, messages=HELLO, response_format=Sum)
    said: Any = parsed.choices[0].message
    assert said.parsed == Sum(a=1)
    write(server, '<tool_call>{"name": "Sum", "arguments": {"a": 2}}</tool_call>')
    tools: Any = [openai.pydantic_function_tool(Sum)]
    parsed_call = await completions.parse(model=MODEL, messages=HELLO, tools=tools)
    called: Any = parsed_call.choices[0].message
    assert called.tool_calls[0].function.parsed_arguments == Sum(a=2)
    result: Any = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "3"}
    await completions.create(model=MODEL, messages=[*HELLO, said, *HELLO, called, result])


async def test_calls_merged_from_a_stream_s_deltas_go_back(server: Server) -> None:
    write(server, '<tool_call>{"name": "Sum", "arguments": {"a": 2}}</tool_call>')
    tools: Any = [openai.pydantic_function_tool(Sum)]
    stream = await server.openai.chat.completions.create(
        model=MODEL, messages=HELLO, tools=tools, stream=True
    )
    deltas: list[Any] = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
    first, *rest = [call for delta in deltas for call in delta.tool_calls or []]
    first.function.arguments += "".join(call.function.arguments for call in rest)
    answer: Any = {"role": "assistant", "tool_calls": [first.to_dict()]}
    assert answer["tool_calls"][0]["index"] == 0
    result: Any = {"role": "tool", "tool_call_id": first.id, "content": "3"}
    await server.openai.chat.completions.create(model=MODEL, messages=[*HELLO, answer, result])


async def test_an_answer_that_litellm_has_kept_goes_back(server: Server) -> None:
    """It copies each field that it does not know, and gives the reasoning in three shapes."""
    extra = {"provider_specific_fields": {"refusal": None, "reasoning_content": "Hm"}}
    function = {"name": "add", "arguments": '{"a": 1}', **extra}
    answer = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function, **extra}],
        "function_call": None,
        "reasoning_content": "Hm",
        "thinking_blocks": [{"type": "thinking", "thinking": "Hm"}],
        "reasoning_items": [{"type": "reasoning", "summary": []}],
        "images": None,
        "audio": None,
        "annotations": [],
        **extra,
    }
    result = {"role": "tool", "tool_call_id": "c1", "content": "3"}
    body = {"model": MODEL, "messages": [*HELLO, answer, result], "tools": [ADD]}
    answered = await server.http.post("/v1/chat/completions", json=body)
    assert answered.status_code == 200, answered.text


@pytest.mark.parametrize(
    "message", [{"role": "assistant"}, {"role": "user", "content": None}, {"role": "user"}]
)
async def test_other_messages_have_content(server: Server, message: Any) -> None:
    body = {"model": MODEL, "messages": [*HELLO, message]}
    refused = await server.http.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages.1.content")


@pytest.mark.parametrize(
    ("extra", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "integer"}},
                }
            },
            "json_schema",
            '{"type":"integer"}',
        ),
        ({"response_format": {"type": "regex", "pattern": "a+"}}, "regex", "a+"),
        ({"guided_regex": "b+"}, "regex", "b+"),
        ({"guided_choice": ["x", "y"]}, "choice", '["x", "y"]'),
        ({"guided_grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"guided_json": {"type": "null"}}, "json_schema", '{"type":"null"}'),
        ({"structured_outputs": {"regex": "b+"}}, "regex", "b+"),
        ({"structured_outputs": {"choice": ["x", "y"]}}, "choice", '["x", "y"]'),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "ebnf", 'root ::= "a"'),
        ({"structured_outputs": {"json": {"type": "null"}}}, "json_schema", '{"type":"null"}'),
        ({"structured_outputs": {"json": "{}", "regex": None}}, "json_schema", "{}"),
        ({"response_format": {"type": "choice", "choices": ["x"]}}, "choice", '["x"]'),
    ],
)
async def test_response_formats(server: Server, extra: Any, kind: str, source: str) -> None:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 1, **extra}
    answer = await server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    grammar = server.engine.seen[-1].sampling.grammar
    assert grammar is not None
    assert (grammar.kind, grammar.text) == (kind, source)


async def test_the_template_may_refuse(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await server.openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "refuse me"}]
        )
    assert "not this" in str(caught.value)
    assert caught.value.param == "messages"
