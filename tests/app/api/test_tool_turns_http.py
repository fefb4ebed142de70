"""Conversations of two turns with parallel calls, by the packages of OpenAI and Anthropic, for
every family."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from app.text.processor import TextProcessor
from tests.app.api.conftest import MODEL, Server, StartServer
from tests.app.api.family_answers import ANSWERS, ARGUMENTS, NUMBERS, THINKS
from tests.app.text.families import FAMILIES, family_folder

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
}
KEEPS = tuple(one for one in THINKS if one != "r1")  # the reasoning between calls
RESULTS = ("result one", "result two")
FAMILY = pytest.mark.parametrize("family", sorted(ANSWERS))
STREAM = pytest.mark.parametrize("stream", [False, True])
# Chats have every family both ways; what the others add to them is tried one way with each.
ONE_WAY = pytest.mark.parametrize(
    ("family", "stream"), [(one, number % 2 > 0) for number, one in enumerate(sorted(ANSWERS))]
)
Ready = Callable[[str], Any]


def test_every_family_is_here() -> None:
    assert set(ANSWERS) == set(FAMILIES)


@pytest.fixture(scope="module")
def processors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, TextProcessor]]:
    made = {
        family: TextProcessor(family_folder(Path(tmp_path_factory.mktemp(family)), family))
        for family in ANSWERS
    }
    yield made
    for processor in made.values():
        processor.close()


@pytest.fixture
def ready(start_server: StartServer, processors: dict[str, TextProcessor]) -> Ready:
    """A server whose model writes a family's two calls, and how to read its last prompt."""

    async def start(family: str) -> tuple[Server, Callable[[], str]]:
        processor = processors[family]
        server = await start_server(processor=processor)
        end = server.engine.card.eos_token_ids[0]
        tokens = [*processor.encode_now(ANSWERS[family]), end]
        server.engine.script = lambda request, index: tokens

        def shown() -> str:
            return processor.decode(server.engine.seen[-1].prompt, skip_special_tokens=False)

        return server, shown

    return start


@pytest.fixture
async def anthropic_of() -> AsyncIterator[Callable[[Server], anthropic.AsyncAnthropic]]:
    made: list[anthropic.AsyncAnthropic] = []

    def make(server: Server) -> anthropic.AsyncAnthropic:
        made.append(anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0))
        return made[-1]

    yield make
    for client in made:
        await client.close()


def check_prompt(family: str, prompt: str) -> None:
    """The second turn shows both calls, their results and the reasoning between."""
    for once in (*map(str, NUMBERS), *RESULTS):
        assert prompt.count(once) == 1, once
    assert prompt.count("Two of them.") == (family in KEEPS)


@FAMILY
@STREAM
async def test_chat(ready: Ready, family: str, stream: bool) -> None:
    server, shown = await ready(family)
    messages: list[Any] = [{"role": "user", "content": "Sums?"}]
    request: dict[str, Any] = {
        "model": MODEL,
        "tools": [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}],
    }
    completions = server.openai.chat.completions
    if stream:
        async with completions.stream(**request, messages=messages) as events:
            choice: Any = (await events.get_final_completion()).choices[0]
    else:
        choice = (await completions.create(**request, messages=messages)).choices[0]
    message = choice.message
    assert choice.finish_reason == "tool_calls"
    assert not message.content
    assert (getattr(message, "reasoning_content", None) or "").strip() == (
        "Two of them." if family in THINKS else ""
    )
    assert [one.function.name for one in message.tool_calls] == ["add", "add"]
    assert [json.loads(one.function.arguments)["a"] for one in message.tool_calls] == [*NUMBERS]
    ids = [one.id for one in message.tool_calls]
    assert len(set(ids)) == 2
    messages.append(message.model_dump())
    messages += [
        {"role": "tool", "tool_call_id": one, "content": content}
        for one, content in zip(ids, RESULTS, strict=True)
    ]
    await completions.create(**request, messages=messages)
    check_prompt(family, shown())


@ONE_WAY
async def test_responses(ready: Ready, family: str, stream: bool) -> None:
    server, shown = await ready(family)
    given: list[Any] = [{"role": "user", "content": "Sums?"}]
    request: dict[str, Any] = {
        "model": MODEL,
        "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}],
    }
    if stream:
        async with server.openai.responses.stream(**request, input=given) as events:
            answer: Any = await events.get_final_response()
    else:
        answer = await server.openai.responses.create(**request, input=given)
    kinds = [item.type for item in answer.output]
    assert kinds == [*(["reasoning"] if family in THINKS else []), *["function_call"] * 2]
    calls = answer.output[-2:]
    assert [json.loads(call.arguments)["a"] for call in calls] == [*NUMBERS]
    given += [item.model_dump() for item in answer.output]
    given += [
        {"type": "function_call_output", "call_id": call.call_id, "output": output}
        for call, output in zip(calls, RESULTS, strict=True)
    ]
    await server.openai.responses.create(**request, input=given)
    check_prompt(family, shown())


@ONE_WAY
async def test_messages(
    ready: Ready,
    anthropic_of: Callable[[Server], anthropic.AsyncAnthropic],
    family: str,
    stream: bool,
) -> None:
    server, shown = await ready(family)
    messages: list[Any] = [{"role": "user", "content": "Sums?"}]
    request: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 1000,
        "tools": [{"name": "add", "input_schema": SCHEMA}],
    }
    client = anthropic_of(server)
    if stream:
        async with client.messages.stream(**request, messages=messages) as events:
            answer: Any = await events.get_final_message()
    else:
        answer = await client.messages.create(**request, messages=messages)
    uses = [block for block in answer.content if block.type == "tool_use"]
    assert [use.input["a"] for use in uses] == [*NUMBERS]
    assert [b.type for b in answer.content[:-2]] == (["thinking"] if family in THINKS else [])
    blocks = [block.model_dump() for block in answer.content]
    messages.append({"role": "assistant", "content": blocks})
    results = [
        {"type": "tool_result", "tool_use_id": use.id, "content": content}
        for use, content in zip(uses, RESULTS, strict=True)
    ]
    messages.append({"role": "user", "content": results})
    await client.messages.create(**request, messages=messages)
    check_prompt(family, shown())


@ONE_WAY
async def test_without_parallel_calls_the_first_alone_comes(
    ready: Ready,
    anthropic_of: Callable[[Server], anthropic.AsyncAnthropic],
    family: str,
    stream: bool,
) -> None:
    server, _ = await ready(family)
    client, given = server.openai, [{"role": "user", "content": "Sums?"}]
    request: dict[str, Any] = {"model": MODEL, "parallel_tool_calls": False}
    function = {"name": "add", "parameters": SCHEMA}
    tools: Any = [{"type": "function", "function": function}]
    answers: list[tuple[str, list[Any]]] = []
    if stream:
        async with client.chat.completions.stream(**request, messages=given, tools=tools) as events:
            choice: Any = (await events.get_final_completion()).choices[0]
    else:
        chat = await client.chat.completions.create(**request, messages=given, tools=tools)
        choice = chat.choices[0]
    answers.append((choice.finish_reason, choice.message.tool_calls))
    tools = [{"type": "function", **function}]
    if stream:
        async with client.responses.stream(**request, input=given, tools=tools) as events:
            response: Any = await events.get_final_response()
    else:
        response = await client.responses.create(**request, input=given, tools=tools)
    calls = [item for item in response.output if item.type == "function_call"]
    answers.append((response.status, calls))
    asked: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 1000,
        "messages": given,
        "tools": [{"name": "add", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    }
    if stream:
        async with anthropic_of(server).messages.stream(**asked) as events:
            message: Any = await events.get_final_message()
    else:
        message = await anthropic_of(server).messages.create(**asked)
    uses = [block for block in message.content if block.type == "tool_use"]
    answers.append((message.stop_reason, uses))
    assert [reason for reason, _ in answers] == ["tool_calls", "completed", "tool_use"]
    assert [len(calls) for _, calls in answers] == [1, 1, 1]
    assert json.loads(answers[0][1][0].function.arguments) == json.loads(ARGUMENTS[0])
    assert json.loads(answers[1][1][0].arguments) == json.loads(ARGUMENTS[0])
    assert answers[2][1][0].input == json.loads(ARGUMENTS[0])


@pytest.mark.parametrize("given", ["", " ", None])
async def test_no_arguments_are_an_empty_object(ready: Ready, given: str | None) -> None:
    server, shown = await ready("qwen3_coder")
    calls = [{"id": "x", "type": "function", "function": {"name": "now", "arguments": given}}]
    await server.openai.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "tool_calls": calls},  # type: ignore[list-item]
            {"role": "tool", "tool_call_id": "x", "content": "noon"},
        ],
    )
    assert "<function=now>\n</function>" in shown()
