"""/v1/messages by Anthropic's own client."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from app.api.http.options import ApiOptions, KeyLimits
from app.engine_client.client import EngineUnavailable, RequestRefused
from app.text.processor import TextProcessor
from tests.app.api.conftest import MODEL, Server, StartServer
from tests.app.text.families import family_folder

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
FORMAT: Any = {
    "type": "json_schema",
    "schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
ADD: Any = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
ANSWER = (
    '<think>\nHm.\n</think>\n\nSo:<tool_call>{"name": "add", "arguments": {"a": 1, "b": "x"}}'
    '</tool_call>\n<tool_call>{"name": "add"}</tool_call>'
)


MAX = sys.float_info.max
RESULT = {"type": "tool_result", "content": "3"}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextProcessor]:
    processor = TextProcessor(family_folder(Path(tmp_path_factory.mktemp("qwen3")), "qwen3"))
    yield processor
    processor.close()


@pytest.fixture
async def thinker(start_server: StartServer, qwen3: TextProcessor) -> Server:
    return await start_server(processor=qwen3)


@pytest.fixture
async def clients() -> AsyncIterator[list[anthropic.AsyncAnthropic]]:
    made: list[anthropic.AsyncAnthropic] = []
    yield made
    for client in made:
        await client.close()


@pytest.fixture
def client_of(clients: list[anthropic.AsyncAnthropic]) -> Any:
    def make(server: Server, key: str = "none") -> anthropic.AsyncAnthropic:
        clients.append(anthropic.AsyncAnthropic(base_url=server.url, api_key=key, max_retries=0))
        return clients[-1]

    return make


def write(server: Server, processor: TextProcessor, text: str) -> None:
    tokens = [*processor.encode_now(text), server.engine.card.eos_token_ids[0]]
    server.engine.script = lambda request, index: tokens


def shown(server: Server, processor: TextProcessor) -> str:
    """The prompt of the last request."""
    return processor.decode(server.engine.seen[-1].prompt, skip_special_tokens=False)


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_text_and_parallel_calls(
    thinker: Server, qwen3: TextProcessor, client_of: Any, stream: bool
) -> None:
    write(thinker, qwen3, ANSWER)
    thinker.engine.num_cached_tokens = 3
    request: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 400, "tools": [ADD]}
    if stream:
        async with client_of(thinker).messages.stream(**request) as events:
            kinds = [event.type async for event in events]
            found = await events.get_final_message()
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
        assert kinds.count("input_json") >= 3  # argument by argument
    else:
        found = await client_of(thinker).messages.create(**request)
    thought, text, first, second = found.content
    assert (thought.type, thought.thinking) == ("thinking", "Hm.")
    assert (text.type, text.text) == ("text", "So:")
    assert (first.type, first.name, first.input) == ("tool_use", "add", {"a": 1, "b": "x"})
    assert (second.name, second.input) == ("add", {})
    assert first.id.startswith("toolu_")
    assert first.id != second.id
    assert found.stop_reason == "tool_use"
    assert found.model == MODEL
    num_prompt = len(thinker.engine.seen[-1].prompt)
    assert (found.usage.input_tokens, found.usage.cache_read_input_tokens) == (num_prompt - 3, 3)
    assert found.usage.output_tokens == len(qwen3.encode_now(ANSWER)) + 1


async def test_a_conversation_with_tools_reaches_the_template(
    server: Server, text: TextProcessor, client_of: Any
) -> None:
    request: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 2,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "tools": [ADD],
        "messages": [
            {"role": "user", "content": "1+2?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "add", "signature": ""},
                    {"type": "text", "text": "Let me see."},
                    {
                        "type": "tool_use",
                        "id": "t1",
                        "name": "add",
                        "input": {"a": 1},
                        "toolset_name": "sums",
                    },
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "no", "is_error": True},
                    {"type": "text", "text": "Well?"},
                ],
            },
        ],
    }
    client = client_of(server)
    answer = await client.messages.create(**request)
    assert answer.stop_reason == "max_tokens"
    prompt = shown(server, text)
    assert prompt.startswith('<|tool|>{"type": "function", "function": {"name": "add", ')
    assert prompt.endswith(
        "<|system|>Be brief.<|end|><|user|>1+2?<|end|><|assistant|>Let me see."
        '{"name": "add", "arguments": {"a": 1}}<|end|><|tool|>Error: no<|end|><|user|>Well?<|end|>'
        "<|assistant|>"
    )
    request.pop("max_tokens")
    counted = await client.messages.count_tokens(**request)
    assert counted.input_tokens == answer.usage.input_tokens == len(server.engine.seen[-1].prompt)


async def test_a_conversation_of_another_server_goes_on_here(
    server: Server, text: TextProcessor, client_of: Any
) -> None:
    found = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}},
        {"type": "text", "text": "Found: "},
        *({"type": "tool_reference", "tool_name": name} for name in ("add", "mul")),
    ]
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "EmwKAhgB"},
                {"type": "tool_use", "id": "t1", "name": "search", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": found}],
        },
    ]
    await client_of(server).messages.create(model=MODEL, max_tokens=2, messages=messages)
    assert shown(server, text).endswith(
        '<|assistant|>{"name": "search", "arguments": {}}<|end|><|tool|>'
        "[image left out: the model takes text only]\nFound: add\nmul\n<|end|><|assistant|>"
    )


async def test_a_system_message_may_stand_within_the_conversation(
    server: Server, text: TextProcessor, client_of: Any
) -> None:
    brief = [{"type": "text", "text": "Be brief."}]
    messages = [
        *HELLO,
        {"role": "assistant", "content": "Yes?"},
        {"role": "system", "content": brief},
        *HELLO,
        {"role": "system", "content": "Now."},
    ]
    await client_of(server).messages.create(model=MODEL, max_tokens=2, messages=messages)
    assert shown(server, text) == (
        "<|user|>Hi<|end|><|assistant|>Yes?<|end|><|system|>Be brief.<|end|><|user|>Hi<|end|>"
        "<|system|>Now.<|end|><|assistant|>"
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_reasons(
    server: Server, text: TextProcessor, client_of: Any, stream: bool
) -> None:
    write(server, text, "one STOP two")
    client = client_of(server)

    async def ask(**fields: Any) -> Any:
        request = {"model": MODEL, "messages": HELLO, "max_tokens": 100, **fields}
        if not stream:
            return await client.messages.create(**request)
        async with client.messages.stream(**request) as events:
            return await events.get_final_message()

    cut = await ask(stop_sequences=["END", "STOP"])
    assert (cut.stop_reason, cut.stop_sequence, cut.content[0].text) == (
        "stop_sequence",
        "STOP",
        "one ",
    )
    whole = await ask()
    assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)
    assert whole.content[0].text == "one STOP two"
    assert (await ask(max_tokens=3)).stop_reason == "max_tokens"
    assert (await ask(max_tokens=20_000)).stop_reason == "end_turn"  # cut to the context
    write(server, text, "x y " * server.engine.card.max_model_len)
    # A client would ask for more tokens after "max_tokens", and get the same.
    assert (await ask(max_tokens=20_000)).stop_reason == "model_context_window_exceeded"
    assert (await ask(max_tokens=30)).stop_reason == "max_tokens"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"a": 1e999, "b": [-1e999, 2.5]}', {"a": MAX, "b": [-MAX, 2.5]}),
        (r'{"a": "half \ud83d", "b": "\ud83d\ude00"}', {"a": "half \ufffd", "b": "\U0001f600"}),
    ],
)
async def test_arguments_that_json_cannot_hold_are_replaced(
    thinker: Server, qwen3: TextProcessor, client_of: Any, written: str, read: Any
) -> None:
    """They would be a 500 after the whole answer, or a block that cannot be sent back."""
    call = f'<think>\n</think>\n<tool_call>{{"name": "add", "arguments": {written}}}</tool_call>'
    write(thinker, qwen3, call)
    request: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "tools": [ADD]}
    answer = await client_of(thinker).messages.create(**request, messages=HELLO)
    (block,) = answer.content
    assert block.input == read
    turns = [*HELLO, {"role": "assistant", "content": [block.model_dump(exclude={"caller"})]}]
    turns.append({"role": "user", "content": [{**RESULT, "tool_use_id": block.id}]})
    await client_of(thinker).messages.create(**request, messages=turns)


async def test_a_message_starts_without_a_stop_sequence_even_if_one_begins_it(
    server: Server, text: TextProcessor
) -> None:
    """The text before the first event is all of it then."""
    write(server, text, "S")
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 9, "stream": True}
    answer = await server.http.post("/v1/messages", json={**body, "stop_sequences": ["S"]})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:6] == "data: "]
    (start,) = [event["message"] for event in events if event["type"] == "message_start"]
    assert (start["stop_reason"], start["stop_sequence"]) == (None, None)
    (end,) = [event["delta"] for event in events if event["type"] == "message_delta"]
    assert end == {"stop_reason": "stop_sequence", "stop_sequence": "S"}


@pytest.mark.parametrize(
    ("choice", "grammar"),
    [
        ({"type": "any"}, '"type":"array"'),
        ({"type": "any", "disable_parallel_tool_use": True}, '"const":"add"'),
        ({"type": "tool", "name": "add"}, '"const":"add"'),
    ],
)
async def test_a_forced_tool_is_constrained(
    server: Server, text: TextProcessor, client_of: Any, choice: Any, grammar: str
) -> None:
    write(server, text, '{"name": "add", "arguments": {"a": 1}}')
    answer = await client_of(server).messages.create(
        model=MODEL, messages=HELLO, max_tokens=100, tools=[ADD], tool_choice=choice
    )
    assert [(block.type, block.input) for block in answer.content] == [("tool_use", {"a": 1})]
    constraint = server.engine.seen[-1].sampling.grammar
    assert constraint is not None
    assert grammar in constraint.text
    assert ('"type":"array"' in constraint.text) == ('"type":"array"' in grammar)


async def test_a_forced_tool_goes_before_the_format_of_the_text(
    server: Server, text: TextProcessor
) -> None:
    write(server, text, '{"name": "add", "arguments": {"a": 1}}')
    choice = {"type": "tool", "name": "add"}
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 100, "tools": [ADD]}
    answer = await server.http.post(
        "/v1/messages",
        json={**body, "tool_choice": choice, "output_config": {"format": FORMAT}},
        timeout=60,
    )
    assert [(part["type"], part["input"]) for part in answer.json()["content"]] == [
        ("tool_use", {"a": 1})
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_tool_runner_of_anthropics_client_goes_on_without_a_thread(
    server: Server, text: TextProcessor, client_of: Any, stream: bool
) -> None:
    """It asks the server to hold the conversation, and does without only if told in its own way."""

    @anthropic.beta_async_tool
    async def add(a: int) -> str:
        """Add one."""
        return str(a + 1)

    write(server, text, '{"name": "add", "arguments": {"a": 1}}')
    runner = client_of(server).beta.messages.tool_runner(
        model=MODEL,
        messages=HELLO,
        max_tokens=100,
        tools=[add],
        tool_choice={"type": "tool", "name": "add"},
        max_iterations=2,
        stream=stream,
    )
    said = [await item.get_final_message() if stream else item async for item in runner]
    assert [[block.input for block in message.content] for message in said] == 2 * [[{"a": 1}]]
    assert "2" in shown(server, text)  # what the tool said


async def test_a_schema_constrains_the_answer(server: Server, client_of: Any) -> None:
    client = client_of(server)
    request = {"model": MODEL, "messages": HELLO, "max_tokens": 5}
    wanted: dict[str, Any] = {"output_config": {"format": FORMAT, "effort": None}}
    await client.messages.create(**request, **wanted)
    assert_constrained(server)
    earlier: dict[str, Any] = {"extra_body": {"output_format": FORMAT}}  # of its beta
    await client.messages.create(**request, **earlier)
    assert_constrained(server)
    required = {"tools": [ADD], "tool_choice": {"type": "any"}}
    await client.messages.create(**request, **earlier, **required)  # without effect
    with pytest.raises(anthropic.BadRequestError, match="Give either 'output_config"):
        await client.messages.create(**request, **wanted, **earlier)


def assert_constrained(server: Server) -> None:
    constraint = server.engine.seen[-1].sampling.grammar
    assert constraint is not None
    assert (constraint.kind, json.loads(constraint.text)) == ("json_schema", FORMAT["schema"])


async def test_what_coding_agents_send_by_themselves_is_accepted(
    server: Server, client_of: Any
) -> None:
    tool = {
        **ADD,
        "strict": True,
        "eager_input_streaming": True,
        "defer_loading": False,
        "input_examples": [{"a": 1}],
        "allowed_callers": ["direct"],
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
    }
    edits = [
        {"type": "clear_thinking_20251015", "keep": "all"},
        {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 9}},
    ]
    conversation: dict[str, Any] = {
        "model": MODEL,
        "messages": HELLO,
        "tools": [tool],
        "context_management": {"edits": edits},
        "mcp_servers": [],
        "speed": "standard",
        "thinking": {"type": "adaptive"},
        "output_config": {"task_budget": {"type": "tokens", "total": 20_000}},
        "betas": ["context-management-2025-06-27"],
        "extra_body": {"inference_geo": "eu"},
    }
    beta = client_of(server).beta.messages
    await beta.create(
        **conversation,
        max_tokens=5,
        metadata={"user_id": "x" * 200},
        service_tier="auto",
        diagnostics={"previous_message_id": None},
    )
    num_tokens = len(server.engine.seen[-1].prompt)
    assert (await beta.count_tokens(**conversation)).input_tokens == num_tokens
    plain = {"model": MODEL, "messages": HELLO, "tools": [ADD]}
    assert (await beta.count_tokens(**plain)).input_tokens == num_tokens


async def test_what_claude_code_puts_first_is_not_in_the_prompt(
    server: Server, text: TextProcessor, client_of: Any
) -> None:
    """A part of it is new in every request, and would keep the rest out of the prefix cache."""
    client = client_of(server)
    rest = "You are kind. x-anthropic-billing-header: is a header."

    async def prompt_of(system: Any) -> str:
        request = {"model": MODEL, "messages": HELLO, "system": system}
        answer = await client.messages.create(**request, max_tokens=2)
        counted = await client.messages.count_tokens(**request)
        assert counted.input_tokens == answer.usage.input_tokens
        return shown(server, text)

    for cch in ("fa690", "97bd6"):
        line = f"x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={cch};"
        blocks = [{"type": "text", "text": part} for part in (line, rest)]
        for system in (blocks, f"{line}\n{rest}", [{"type": "text", "text": f"{line}\n{rest}"}]):
            assert (
                await prompt_of(system) == f"<|system|>{rest}<|end|><|user|>Hi<|end|><|assistant|>"
            )
        assert await prompt_of(line) == "<|user|>Hi<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("form", "user"),
    [
        ("user_0af3_account_6b-7c_session_{}", "user_0af3_account_6b-7c"),
        ("user_0af3_account__session_{}", "user_0af3_account_"),
        (
            '{{"session_id": "{}", "device_id": "d1", "account_uuid": ""}}',
            '{"account_uuid": "", "device_id": "d1"}',
        ),
        ("bob_session_{}", None),
        ("[{}]", None),
        ('{{"name": "{}"}}', None),
    ],
)
async def test_sessions_of_one_user_are_one_tenant(
    start_server: StartServer, server: Server, form: str, user: str | None
) -> None:
    """And share their cached prefixes; what has not the form of Claude Code's id is taken whole."""
    keyed = await start_server(ApiOptions(api_keys={"secret": KeyLimits()}))
    for session in ("57a121ec-f78c-48c3-a745-e3036a3ecc33", "1"):
        given = form.format(session)
        body = {"model": MODEL, "messages": HELLO, "max_tokens": 2, "metadata": {"user_id": given}}
        await server.http.post("/v1/messages", json=body)
        request = server.engine.seen[-1]
        assert (request.tenant, request.cache_salt) == (user or given, user or given)
        await keyed.http.post("/v1/messages", json=body, headers={"x-api-key": "secret"})
        request = keyed.engine.seen[-1]
        assert request.cache_salt == f"{request.tenant}/{user or given}"


async def test_a_tool_s_name_has_up_to_128_characters(
    server: Server, text: TextProcessor, client_of: Any
) -> None:
    """Servers of tools prefix their own: `mcp__<server>__<tool>`."""
    name = "mcp__" + "x" * 123
    write(server, text, f'{{"name": "{name}", "arguments": {{"a": 1}}}}')
    request: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 200,
        "tools": [{**ADD, "name": name}],
        "tool_choice": {"type": "tool", "name": name},
    }
    client = client_of(server)
    answer = await client.messages.create(**request, messages=HELLO)
    assert [block.name for block in answer.content] == [name]
    blocks = [block.model_dump() for block in answer.content]
    results = [{"type": "tool_result", "tool_use_id": answer.content[0].id, "content": "2"}]
    conversation = [
        *HELLO,
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": results},
    ]
    assert (await client.messages.create(**request, messages=conversation)).content
    with pytest.raises(anthropic.BadRequestError, match=r"tools\.0\.name"):
        await client.messages.create(
            **{**request, "tools": [{**ADD, "name": name + "x"}]}, messages=HELLO
        )


async def test_thinking_is_switched_or_refused(
    thinker: Server, server: Server, qwen3: TextProcessor, client_of: Any
) -> None:
    request: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 2000}
    off = {"type": "disabled"}
    on = {"type": "enabled", "budget_tokens": 1024}
    efforts: list[dict[str, Any]] = [{}, {"output_config": {"effort": "high"}}]
    for effort in efforts:
        await client_of(thinker).messages.create(**request, thinking=off, **effort)
        assert "</think>" in shown(thinker, qwen3)
        await client_of(thinker).messages.create(**request, thinking=on, **effort)
        assert "</think>" not in shown(thinker, qwen3)
        with pytest.raises(anthropic.BadRequestError, match="not write its thinking"):
            await client_of(server).messages.create(**request, thinking=on, **effort)
    await client_of(server).messages.create(**request, thinking=off)
    hidden = {**on, "display": "omitted"}
    for most in ("xhigh", "max"):
        most_effort = {"output_config": {"effort": most}}
        await client_of(thinker).messages.create(**request, thinking=hidden, **most_effort)
        assert "</think>" not in shown(thinker, qwen3)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "I"}]}, "messages.1.role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "the models here take text only",
        ),
        (
            {
                "messages": [
                    {
                        "role": "system",
                        "content": [{"type": "tool_result", "tool_use_id": "t", "content": "1"}],
                    }
                ]
            },
            "A system's message holds no tool_result.",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "redacted_thinking", "data": "x"}]}
                ]
            },
            "A user's message holds no redacted_thinking.",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}, "tools": [ADD]}, "tool_choice.name"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"output_config": {"format": {"type": "regex"}}}, "output_config.format"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        (
            {"context_management": {"edits": [{"type": "compact_20260112"}]}},
            "context_management.edits.0.type",
        ),
        ({"nonsense": 1}, "nonsense"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_refusals_name_the_parameter(server: Server, extra: Any, said: str) -> None:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 5, **extra}
    answer = await server.http.post("/v1/messages", json=body)
    assert answer.status_code == 400
    found = answer.json()
    assert (found["type"], found["error"]["type"]) == ("error", "invalid_request_error")
    assert said in found["error"]["message"]
    assert found["request_id"] == answer.headers["request-id"]
    assert not server.engine.seen


async def test_errors_have_anthropics_shape_at_every_depth(
    start_server: StartServer, client_of: Any
) -> None:
    server = await start_server(ApiOptions(api_keys={"secret": KeyLimits()}))
    request: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 5}
    assert (await client_of(server, "secret").messages.create(**request)).content
    bearer = {"Authorization": "Bearer secret"}
    assert (await server.http.post("/v1/messages", json=request, headers=bearer)).status_code == 200
    with pytest.raises(anthropic.AuthenticationError) as wrong_key:
        await client_of(server, "guess").messages.create(**request)
    assert wrong_key.value.body["error"]["type"] == "authentication_error"
    client = client_of(server, "secret")
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(**{**request, "model": "other"})
    server.engine.refusal = RequestRefused("later", retry_after_s=3.0)
    with pytest.raises(anthropic.RateLimitError) as refused:
        await client.messages.create(**request)
    assert refused.value.response.headers["retry-after"] == "3"
    server.engine.refusal = EngineUnavailable("down")
    with pytest.raises(anthropic.InternalServerError) as down:
        await client.messages.create(**request)
    assert down.value.body["error"]["type"] == "overloaded_error"
    wrong_method = await server.http.get("/v1/messages", headers={"x-api-key": "secret"})
    assert (wrong_method.status_code, wrong_method.json()["type"]) == (405, "error")


async def test_only_a_picture_is_said_to_be_no_text(server: Server) -> None:
    for kind, is_medium in (("image", True), ("document", True), ("server_tool_use", False)):
        content = [{"type": kind, "id": "1", "name": "x", "input": {}}]
        for whole in (content, [{"type": "tool_result", "tool_use_id": "t", "content": content}]):
            messages = [{"role": "user", "content": whole}]
            body = {"model": MODEL, "messages": messages, "max_tokens": 2}
            answer = await server.http.post("/v1/messages", json=body)
            if is_medium and whole is not content:
                assert answer.status_code == 200  # the model is told that it is left out
                continue
            message = answer.json()["error"]["message"]
            assert ("text only" in message) is is_medium, message
            assert kind in message


async def test_an_error_names_its_parameter_once(server: Server) -> None:
    choice = {"type": "tool", "name": "zz"}
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 2, "tools": [ADD]}
    answer = await server.http.post("/v1/messages", json={**body, "tool_choice": choice})
    message = answer.json()["error"]["message"]
    assert message == "tool_choice names 'zz', which is not among the tools."


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_s_client_finds_the_request_s_id(server: Server, stream: bool) -> None:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 2, "stream": stream}
    answer = await server.http.post("/v1/messages", json=body, headers={"x-request-id": "my-id"})
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == "my-id"


async def test_a_stream_that_breaks_says_so(server: Server) -> None:
    server.engine.fail_at = 2
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 5, "stream": True}
    answer = await server.http.post("/v1/messages", json=body)
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert json.loads(events[0])["type"] == "message_start"
    last = json.loads(events[-1])
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert "[DONE]" not in answer.text
