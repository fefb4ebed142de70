"""Responses, embeddings, tokens, models, and the document that describes them all."""

from __future__ import annotations

import math
from typing import Any

import pytest

from actors.scheduling.interfaces import Quote, QuoteRequest
from actors.scheduling.request import Objective
from app.api.http.options import ApiOptions, KeyLimits
from tests.app.api.conftest import MODEL, Server, StartServer

ADD: Any = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}


def write(server: Server, text: str) -> None:
    """Make the engine write this text, byte by byte, and end."""
    end_token = server.engine.card.eos_token_ids[0]
    server.engine.script = lambda request, index: [*text.encode(), end_token]


# ---- responses ----------------------------------------------------------------------------


async def test_response_object(server: Server) -> None:
    write(server, "Hellö")
    answer = await server.openai.responses.create(
        model=MODEL, input="Hi", instructions="Be kind.", temperature=0.5, metadata={"a": "b"}
    )
    assert answer.output_text == "Hellö"
    assert answer.status == "completed"
    assert answer.usage is not None
    assert answer.usage.output_tokens == len("Hellö".encode()) + 1
    assert (answer.temperature, answer.metadata) == (0.5, {"a": "b"})
    shown = await server.http.post(
        "/detokenize", json={"tokens": list(server.engine.seen[-1].prompt)}
    )
    assert shown.json()["prompt"] == "<|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>"


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
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference"}]}, "input.0.type"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ],
)
async def test_responses_refuse_by_name(server: Server, extra: Any, param: str) -> None:
    answer = await server.http.post("/v1/responses", json={"model": MODEL, "input": "Hi", **extra})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert "at most 0" not in error["message"]


# ---- embeddings ---------------------------------------------------------------------------


async def test_embeddings_are_normalized_and_in_order(server: Server) -> None:
    answer = await server.openai.embeddings.create(model=MODEL, input=["ab", "c"])
    assert answer.usage.prompt_tokens == 3
    for item, total in zip(answer.data, (97 + 98, 99), strict=True):
        raw = [float(total), 1.0, 2.0, 4.0]  # what HandEngine pools
        length = math.sqrt(sum(value * value for value in raw))
        assert item.embedding == pytest.approx([value / length for value in raw])
    assert {request.pooling for request in server.engine.seen} == {"mean"}


async def test_embeddings_as_they_are(server: Server) -> None:
    answer = await server.http.post(
        "/v1/embeddings",
        json={"model": MODEL, "input": [[97, 98]], "pooling": "last", "normalize": False},
    )
    assert answer.json()["data"][0]["embedding"] == [195.0, 1.0, 2.0, 4.0]
    assert server.engine.seen[-1].pooling == "last"


async def test_models_without_embeddings_say_so(start_server: StartServer) -> None:
    server = await start_server(supports_embeddings=False)
    answer = await server.http.post("/v1/embeddings", json={"model": MODEL, "input": "a"})
    assert answer.status_code == 400


# ---- tokens and models --------------------------------------------------------------------


async def test_tokenize_and_back(server: Server) -> None:
    found = await server.http.post("/tokenize", json={"prompt": "the é", "return_token_strs": True})
    tokens = found.json()["tokens"]
    assert found.json()["count"] == len(tokens)
    assert found.json()["token_strs"] == ["the", " ", "é"]
    back = await server.http.post("/detokenize", json={"tokens": tokens})
    assert back.json() == {"prompt": "the é"}


async def test_tokenize_a_conversation(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False}
    tokens = (await server.http.post("/tokenize", json=body)).json()["tokens"]
    back = await server.http.post("/detokenize", json={"tokens": tokens})
    assert back.json() == {"prompt": "<|user|>Hi<|end|>"}


async def test_models(server: Server) -> None:
    models = await server.openai.models.list()
    assert [model.id for model in models.data] == [MODEL]
    model = await server.openai.models.retrieve(MODEL)
    assert model.created == 1_700_000_000


# ---- quotes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ({"prompt_tokens": 300}, 300),
        ({"prompt": [5, 6, 7]}, 3),
        ({"prompt": "the é"}, 3),
        ({"messages": [{"role": "user", "content": "Hi"}]}, None),
    ],
)
async def test_a_quote_asks_for_what_would_be_sent(
    server: Server, given: dict[str, Any], count: int | None
) -> None:
    if count is None:
        found = await server.http.post("/tokenize", json=given)
        count = found.json()["count"]
    slo = {"tbt_ms": 50, "ttft_ms": 700}
    body = {**given, "max_tokens": 5000, "slo": slo, "user": "ann"}
    answer = (await server.http.post("/v1/slo/quote", json=body)).json()
    room = 4096 - count
    assert server.engine.asked == [QuoteRequest(count, room, Objective(0.05, 0.7), "ann")]
    assert (answer["prompt_tokens"], answer["max_tokens"]) == (count, room)
    assert (answer["can_serve_now"], answer["predicted"], answer["reason"]) == (True, None, None)


async def test_a_quote_is_told_in_milliseconds(server: Server) -> None:
    server.engine.quoted = Quote(False, 0.5, 0.6, 0.04, 0.02, 0.01, 1.25, "busy", "slo.ttft_ms")
    body = {"prompt_tokens": 10, "max_tokens": 4}
    answer = (await server.http.post("/v1/slo/quote", json=body)).json()
    assert answer["can_serve_now"] is False
    assert answer["predicted"] == {"ttft_ms": 500, "ttft_bound_ms": 600, "tbt_bound_ms": 40}
    assert answer["attainable"] == {"ttft_ms": 20, "tbt_ms": 10}
    assert (answer["retry_after_s"], answer["reason"], answer["param"]) == (
        1.25, "busy", "slo.ttft_ms",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({}, "prompt_tokens"),
        ({"prompt_tokens": 3, "prompt": "a"}, "prompt_tokens"),
        ({"prompt_tokens": 3, "tools": []}, "tools"),
        ({"prompt_tokens": 4096}, "prompt_tokens"),
        ({"prompt_tokens": 3, "priority": 1}, "priority"),
        ({"prompt_tokens": 3, "slo": {"tbt_ms": 0}}, "slo.tbt_ms"),
    ],
)
async def test_a_quote_refuses_by_name(server: Server, wrong: Any, param: str) -> None:
    answer = await server.http.post("/v1/slo/quote", json={"max_tokens": 4, **wrong})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


# ---- the document -------------------------------------------------------------------------


async def test_document_describes_what_is_served(start_server: StartServer) -> None:
    server = await start_server(ApiOptions(api_keys={"k": KeyLimits()}))
    headers = {"authorization": "Bearer k"}
    document = (await server.http.get("/openapi.json", headers=headers)).json()
    assert document["security"] == [{"key": []}]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            answer = await server.http.request(method, path, headers=headers)
            assert str(answer.status_code) in operation["responses"], path
            for status in ("401", "403", "404", "405", "429", "431", "500"):
                assert status in operation["responses"]
    chat = document["components"]["schemas"]["ChatRequest"]
    assert chat["additionalProperties"] is False
    assert chat["required"] == ["model", "messages"]
    assert chat["properties"]["model"]["enum"] == [MODEL]
    assert chat["properties"]["temperature"]["anyOf"][0] == {
        "type": "number",
        "minimum": 0,
        "maximum": 2,
    }


async def test_document_has_no_dangling_reference(server: Server) -> None:
    document = (await server.http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]

    def references(node: Any) -> set[str]:
        if isinstance(node, dict):
            own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
            return own.union(*(references(value) for value in node.values()))
        if isinstance(node, list):
            return set().union(*(references(value) for value in node))
        return set()

    found = references(document)
    assert found
    assert {reference.rsplit("/", 1)[1] for reference in found} <= set(schemas)
