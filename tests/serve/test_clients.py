"""Clients that people already have: each against the demo model, as its own documentation says."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.serve.live_server import LiveServer

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

QUESTION = "What is a stall?"
ANSWER = "streaming answer"  # what the demo model says of a stall, greedily


def body(server: LiveServer, **more: object) -> dict[str, object]:
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": server.model, "messages": messages, "temperature": 0, **more}


def test_curl_streams(demo: LiveServer) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("no curl here")
    command = [
        *(curl, "-sN", f"{demo.url}/v1/chat/completions", "-H", "Content-Type: application/json"),
        *("-d", json.dumps(body(demo, stream=True))),
    ]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    events = output.strip().split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert ANSWER in "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def server_sent(lines: Iterator[str]) -> Iterator[tuple[str, str]]:
    """(type, data) of every event, by the rules of the HTML standard that EventSource follows."""
    kind, data = "message", []
    for line in lines:
        if not line:
            if data:
                yield kind, "\n".join(data)
            kind, data = "message", []
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            kind = value
        elif name == "data":
            data.append(value)
        else:
            assert name in ("", "id", "retry"), line  # anything else is ignored: say so here


def test_event_source_reads_both_streams(demo: LiveServer) -> None:
    with httpx.stream(
        "POST", f"{demo.url}/v1/chat/completions", json=body(demo, stream=True), timeout=60
    ) as answer:
        assert answer.headers["content-type"].split(";")[0] == "text/event-stream"
        events = list(server_sent(answer.iter_lines()))
    assert {kind for kind, _ in events} == {"message"}
    assert events[-1][1] == "[DONE]"
    request = {"model": demo.model, "input": QUESTION, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{demo.url}/v1/responses", json=request, timeout=60) as answer:
        events = list(server_sent(answer.iter_lines()))
    named = [(kind, json.loads(data)) for kind, data in events if data != "[DONE]"]
    assert all(kind == data["type"] for kind, data in named)
    assert named[-1][0] == "response.completed"
    assert ANSWER in "".join(d["delta"] for kind, d in named if kind.endswith("text.delta"))


def test_langchain(demo: LiveServer) -> None:
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(
        model=demo.model, base_url=f"{demo.url}/v1", api_key="none", temperature=0
    )
    whole = chat.invoke(QUESTION)
    assert ANSWER in whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    chunks = list(chat.stream(QUESTION))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert len(chunks) > 5
    structured = chat.bind(max_tokens=60).with_structured_output(
        {
            "title": "color",
            "type": "object",
            "properties": {"color": {"enum": ["red", "green"]}},
            "required": ["color"],
            "additionalProperties": False,
        },
        method="json_schema",
    )
    assert structured.invoke("Which color?")["color"] in ("red", "green")
    vectors = langchain.OpenAIEmbeddings(
        model=demo.model,
        base_url=f"{demo.url}/v1",
        api_key="none",
        check_embedding_ctx_length=False,
    ).embed_documents(["a", "b"])
    assert [len(vector) for vector in vectors] == [256, 256]


def test_llama_index(demo: LiveServer) -> None:
    openai_like = pytest.importorskip("llama_index.llms.openai_like")
    model = openai_like.OpenAILike(
        model=demo.model,
        api_base=f"{demo.url}/v1",
        api_key="none",
        is_chat_model=True,
        temperature=0,
        context_window=4096,
    )
    whole = model.complete(QUESTION).text
    assert ANSWER in whole
    assert [part.text for part in model.stream_complete(QUESTION)][-1] == whole


GREEDILY = {"temperature": 0}  # which the package no longer has a name for


def test_anthropic(demo: LiveServer) -> None:
    client = anthropic.Anthropic(base_url=demo.url, api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    request: dict[str, Any] = {"model": demo.model, "max_tokens": 200, "extra_body": GREEDILY}
    whole = client.messages.create(**request, messages=messages)
    assert ANSWER in whole.content[0].text
    assert whole.stop_reason == "end_turn"
    with client.messages.stream(**request, messages=messages) as events:
        pieces = list(events.text_stream)
        final = events.get_final_message()
    assert pieces  # few, where drafts from the answer before are right
    assert "".join(pieces) == whole.content[0].text == final.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = client.messages.count_tokens(model=demo.model, messages=messages).input_tokens
    usage = whole.usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


class Forecast(BaseModel):
    place: Literal["Oslo", "Rome"]
    is_cold: bool


def test_anthropic_parses_into_a_model(demo: LiveServer) -> None:
    client = anthropic.Anthropic(base_url=demo.url, api_key="none", max_retries=0)
    answer = client.messages.parse(
        model=demo.model, max_tokens=200, extra_body=GREEDILY, output_format=Forecast,
        messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
    )  # fmt: skip
    assert isinstance(answer.parsed_output, Forecast)


def test_anthropic_calls_a_tool(demo: LiveServer) -> None:
    client = anthropic.Anthropic(base_url=demo.url, api_key="none", max_retries=0)
    function: dict[str, Any] = WEATHER["function"]
    request: dict[str, Any] = {
        "model": demo.model,
        "max_tokens": 200,
        "extra_body": GREEDILY,
        "tools": [
            {
                "name": function["name"],
                "description": function["description"],
                "input_schema": function["parameters"],
            }
        ],
    }
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    called = client.messages.create(**request, messages=messages, tool_choice={"type": "any"})
    assert called.stop_reason == "tool_use"
    (use,) = called.content
    assert (use.type, use.name, list(use.input)) == ("tool_use", "get_weather", ["location"])
    result = {"temperature": 4, "sky": "cloudy"}
    messages += [
        {"role": "assistant", "content": [use.model_dump(exclude_none=True)]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": use.id, "content": json.dumps(result)}
            ],
        },
    ]
    said = client.messages.create(**request, messages=messages)
    assert said.stop_reason == "end_turn"
    assert "4 degrees" in said.content[0].text


WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get current weather for a location.",
        "parameters": {
            "type": "object",
            "properties": {"location": {"type": "string", "description": "City name"}},
            "required": ["location"],
        },
    },
}


def test_a_tool_is_called_and_its_answer_put_into_words(demo: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none")
    messages: list[dict[str, object]] = [
        {"role": "user", "content": "What is the weather in Oslo?"}
    ]
    called = client.chat.completions.create(
        model=demo.model, messages=messages, tools=[WEATHER], tool_choice="required", temperature=0
    ).choices[0]
    assert called.finish_reason == "tool_calls"
    (call,) = called.message.tool_calls
    assert call.function.name == "get_weather"
    assert list(json.loads(call.function.arguments)) == ["location"]  # which town is its secret
    messages += [
        called.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 4, "sky": "cloudy"}'},
    ]
    said = client.chat.completions.create(
        model=demo.model, messages=messages, tools=[WEATHER], temperature=0
    ).choices[0]
    assert said.finish_reason == "stop"
    assert "4 degrees" in said.message.content


def test_a_call_of_a_strict_tool_keeps_to_its_schema_where_none_has_to_be_made(
    demo: LiveServer,
) -> None:
    client = openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none")
    parameters = {
        "type": "object",
        "properties": {"location": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
        "required": ["location", "days"],
        "additionalProperties": False,
    }
    tool: Any = {
        "type": "function",
        "function": {"name": "get_weather", "parameters": parameters, "strict": True},
    }

    def asked(text: str) -> Any:
        messages: list[Any] = [{"role": "user", "content": text}]
        return client.chat.completions.create(
            model=demo.model, messages=messages, tools=[tool], temperature=0
        ).choices[0]

    called = asked("What is the weather in Oslo?")
    assert called.finish_reason == "tool_calls"
    (call,) = called.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert list(arguments) == ["location", "days"]
    assert arguments["location"] in ("Paris", "Rome")
    said = asked("Hello!")
    assert said.message.content
    assert not said.message.tool_calls
