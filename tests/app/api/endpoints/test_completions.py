"""`/v1/completions` over real HTTP, against tokens computed by hand."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from app.api.events import ApiEvents, Deliveries, RequestInfo, RequestOutcome
from app.api.http.options import ApiOptions, KeyLimits
from app.text.processor import TextProcessor
from tests.app.api.conftest import MODEL, Server, StartServer
from tests.app.api.hand_engine import logprobs_of

PROTOCOLS = ["uvicorn", "own"]


def letters(prompt: str, count: int, index: int = 0) -> str:
    """What HandEngine writes after a prompt of plain ASCII without merges."""
    base = sum(prompt.encode()) + index
    return "".join(chr(97 + (base + i * 7) % 26) for i in range(count))


async def complete(server: Server, **body: Any) -> Any:
    answer = await server.http.post("/v1/completions", json={"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def events_of(server: Server, path: str = "/v1/completions", **body: Any) -> list[Any]:
    """The data of every event; checks that [DONE] ends the stream."""
    async with server.http.stream(
        "POST", path, json={"model": MODEL, "stream": True, **body}
    ) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_whole_answer(server: Server) -> None:
    server.engine.num_cached_tokens = 2
    body = await complete(server, model=MODEL, prompt="abc", max_tokens=5)
    assert body["choices"] == [
        {"index": 0, "text": letters("abc", 5), "logprobs": None, "finish_reason": "length"}
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_stream_has_one_event_per_token(server: Server) -> None:
    events = await events_of(server, prompt="abc", max_tokens=5)
    assert len(events) == 5
    assert "".join(event["choices"][0]["text"] for event in events) == letters("abc", 5)
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 4 + ["length"]


async def test_queued_tokens_share_an_event(server: Server) -> None:
    server.engine.chunk_size = 3
    events = await events_of(server, prompt="abc", max_tokens=5)
    assert [len(event["choices"][0]["text"]) for event in events] == [3, 2]


async def test_usage_comes_last_when_asked_for(server: Server) -> None:
    events = await events_of(
        server, prompt="abc", max_tokens=2, stream_options={"include_usage": True}
    )
    assert [event["usage"] for event in events[:-1]] == [None, None]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["total_tokens"] == 5


async def test_each_event_has_the_usage_so_far_when_asked_for(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [1, 2, 3, 4, 4]
    for extra in ({}, {"echo": True, "logprobs": 0}):
        body: Any = {"prompt": "abc", "max_tokens": 4, "stream_options": options, **extra}
        events = await events_of(server, **body)
        texts = "".join(event["choices"][0]["text"] for event in events[:-1])
        assert texts.removeprefix("abc" if extra else "") == letters("abc", 4)
        assert [event["usage"]["completion_tokens"] for event in events] == counts
        assert [event["usage"]["total_tokens"] - 3 for event in events] == counts
    events = await events_of(server, prompt="abc", max_tokens=0, echo=True, stream_options=options)
    assert [event["usage"]["completion_tokens"] for event in events] == [0, 0]


@pytest.mark.parametrize(
    "prompt",
    [["abc", "xy"], [[97, 98, 99], [120, 121]]],
)
async def test_batches_of_texts_and_of_token_ids(server: Server, prompt: Any) -> None:
    server.engine.num_cached_tokens = 1
    body = await complete(server, prompt=prompt, max_tokens=4, n=2)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in body["choices"]] == [
        letters("abc", 4),
        letters("abc", 4, 1),
        letters("xy", 4),
        letters("xy", 4, 1),
    ]
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["completion_tokens"] == 16
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 2  # one of each prompt


async def test_streamed_batch_keeps_its_streams_apart(server: Server) -> None:
    events = await events_of(server, prompt=["abc", "xy"], max_tokens=4, n=2)
    texts = [""] * 4
    for event in events:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == [
        letters("abc", 4),
        letters("abc", 4, 1),
        letters("xy", 4),
        letters("xy", 4, 1),
    ]


@pytest.mark.parametrize("suffix", ["", None])
async def test_no_suffix_may_be_said(server: Server, suffix: str | None) -> None:
    body = await complete(server, prompt="abc", max_tokens=2, suffix=suffix)
    assert body["choices"][0]["text"] == letters("abc", 2)


async def test_token_ids_are_taken_as_they_are(server: Server) -> None:
    await complete(server, prompt=[97, 98], max_tokens=1)
    assert server.engine.seen[-1].prompt == (97, 98)


async def test_echo_with_prompt_logprobs(server: Server) -> None:
    body = await complete(server, prompt="abc", max_tokens=2, echo=True, logprobs=1)
    choice = body["choices"][0]
    text = "abc" + letters("abc", 2)
    assert choice["text"] == text
    found = choice["logprobs"]
    assert found["tokens"] == list(text)
    assert found["text_offset"] == [0, 1, 2, 3, 4]
    assert found["token_logprobs"] == [
        None,
        *(logprobs_of(ord(char), 1).logprob for char in text[1:]),
    ]
    assert found["top_logprobs"][0] is None
    assert found["top_logprobs"][1]["b"] == logprobs_of(98, 1).logprob or -0.25


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("shows", [False, True])
async def test_offsets_are_those_of_the_echo(
    server: Server, text: TextProcessor, as_text: bool, shows: bool
) -> None:
    """Special tokens of a text are echoed as it has them; those of ids only where asked for."""
    mark = text.decode([server.engine.card.eos_token_ids[0]], skip_special_tokens=False)
    given = f"a{mark}bc"
    prompt = given if as_text else text.encode_now(given)
    fields = {"max_tokens": 1, "echo": True, "logprobs": 0, "skip_special_tokens": not shows}
    choice = (await complete(server, prompt=prompt, **fields))["choices"][0]
    echo = given if as_text or shows else "abc"
    assert choice["text"].startswith(echo)
    begins = [0, 1, len(echo) - 2, len(echo) - 1, len(echo)]
    assert choice["logprobs"]["text_offset"] == begins


async def test_scoring_only(server: Server) -> None:
    """max_tokens 0 with echo: how evaluation harnesses measure likelihoods."""
    body = await complete(server, prompt="abc", max_tokens=0, echo=True, logprobs=1)
    assert body["choices"][0]["text"] == "abc"
    assert body["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c"]
    assert body["usage"]["completion_tokens"] == 0
    events = await events_of(server, prompt="abc", max_tokens=0, echo=True, logprobs=1)
    assert events[0]["choices"][0]["text"] == "abc"
    assert events[0]["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_token_behind_a_mere_echo_leaves_no_trace(
    start_server: StartServer, stream: bool
) -> None:
    """The engine draws one; here it ends the answer, and the key has nothing left for it."""
    limits = KeyLimits(tokens_per_minute=6)
    server = await start_server(ApiOptions(api_keys={"sesame": limits}))
    server.engine.script = lambda request, index: server.engine.card.eos_token_ids
    server.http.headers["authorization"] = "Bearer sesame"
    for _ in range(2):
        if stream:
            (answer,) = await events_of(server, prompt="abc", max_tokens=0, echo=True)
        else:
            answer = await complete(server, prompt="abc", max_tokens=0, echo=True)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("abc", "length")


class Ends(ApiEvents):
    """Keeps what is counted of each request."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int, list[int]]] = []

    def on_request_start(self, request: RequestInfo, now_s: float, deliveries: Deliveries) -> None:
        self.deliveries = deliveries

    def on_finish(self, request: RequestInfo, outcome: RequestOutcome, now_s: float) -> None:
        told = [num_tokens for _, num_tokens, _, _ in self.deliveries.tokens]
        self.found.append((outcome.reason, outcome.num_completion_tokens, told))


async def test_a_mere_echo_is_counted_as_it_is_answered(start_server: StartServer) -> None:
    """No token, the reason of the answer, and a time to its first token: a scored prompt's is when
    its log-probabilities are there."""
    events = Ends()
    server = await start_server(events=events)
    server.engine.script = lambda request, index: server.engine.card.eos_token_ids
    body: dict[str, Any] = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1}
    await complete(server, **body)
    await events_of(server, **body, n=2)
    assert events.found == [("length", 0, [0]), ("length", 0, [0, 0])]


async def test_streamed_echo_and_logprobs(server: Server) -> None:
    events = await events_of(server, prompt="abc", max_tokens=2, echo=True, logprobs=0)
    assert [event["choices"][0]["text"] for event in events] == [
        "abc" + letters("abc", 2)[0],
        letters("abc", 2)[1],
    ]
    assert events[1]["choices"][0]["logprobs"]["text_offset"] == [4]


async def test_best_of_gives_the_likeliest(server: Server) -> None:
    texts = ["ggg", "aaa", "hhh", "www"]  # -(token % 8) / 4: "h" is best, then "a"
    server.engine.script = lambda request, index: texts[index].encode()
    body = await complete(server, prompt="abc", max_tokens=3, n=2, best_of=4)
    assert [choice["text"] for choice in body["choices"]] == ["hhh", "aaa"]
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 12


async def test_logprobs_leave_out_what_a_stop_string_cut_off(server: Server) -> None:
    server.engine.script = lambda request, index: b"abSTOPcd"
    body = await complete(server, prompt="x", max_tokens=8, stop="STOP", logprobs=0)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert body["usage"]["completion_tokens"] == 6


async def test_an_unfinished_stop_string_is_text_in_the_end(server: Server) -> None:
    server.engine.script = lambda request, index: b"abSTO"
    events = await events_of(server, prompt="x", max_tokens=5, stop="STOP", logprobs=0)
    assert [event["choices"][0]["text"] for event in events] == ["a", "b", "", "", "STO"]
    tokens = [event["choices"][0]["logprobs"]["tokens"] for event in events]
    assert tokens == [["a"], ["b"], [], [], ["S", "T", "O"]]


@pytest.mark.parametrize(
    ("min_tokens", "kept"),
    [(0, "ab"), (2, "ab"), (3, "abSTOPc"), (6, "abSTOPc"), (11, "abSTOPcSTOPd")],
)
async def test_stop_strings_count_behind_the_least_tokens(
    server: Server, min_tokens: int, kept: str
) -> None:
    server.engine.script = lambda request, index: b"abSTOPcSTOPd"
    fields = {"max_tokens": 12, "stop": "STOP", "min_tokens": min_tokens}
    (choice,) = (await complete(server, prompt="x", **fields))["choices"]
    events = await events_of(server, prompt="x", **fields)
    assert choice["text"] == "".join(event["choices"][0]["text"] for event in events) == kept


async def test_stop_token_ids_are_not_shown(server: Server) -> None:
    server.engine.script = lambda request, index: b"abcd"
    body = await complete(server, prompt="x", max_tokens=4, stop_token_ids=[99])
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("ab", "stop")
    assert body["usage"]["completion_tokens"] == 3


async def test_more_tokens_than_the_context_leaves_are_refused(server: Server) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": ["a", "abc"], "max_tokens": 4094}
    refused = await server.http.post("/v1/completions", json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "max_tokens")
    assert error["code"] == "context_length_exceeded"
    assert (
        "4096 tokens. However, you requested 4097 tokens (3 in the prompt, 4094 in"
        in (error["message"])
    )
    assert not server.engine.seen
    await complete(server, prompt="abc", max_tokens=4093)
    assert server.engine.seen[-1].sampling.max_tokens == 4093


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("completions", {"prompt": [97] * 4096}),
        ("completions", {"prompt": "a" * 5000}),
        ("messages", {"messages": [{"role": "user", "content": "a" * 5000}], "max_tokens": 1}),
        ("slo/quote", {"prompt_tokens": 5000, "max_tokens": 1}),
    ],
)
async def test_clients_know_a_prompt_that_is_too_long(
    server: Server, route: str, body: dict[str, Any]
) -> None:
    """By the words of either API, on every route."""
    refused = await server.http.post(f"/v1/{route}", json={"model": MODEL, **body})
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    numbers = re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", message)
    assert numbers is not None, message  # what Claude Code searches for
    assert int(numbers[1]) > int(numbers[2]) == 4095
    assert "This model's maximum context length is 4096 tokens" in message


async def test_the_default_number_of_tokens_is_cut_to_the_context(server: Server) -> None:
    await complete(server, prompt=[97] * 4090)
    assert server.engine.seen[-1].sampling.max_tokens == 6


async def test_openai_client(server: Server) -> None:
    stream = await server.openai.completions.create(
        model=MODEL, prompt="abc", max_tokens=3, stream=True
    )
    assert "".join([chunk.choices[0].text async for chunk in stream]) == letters("abc", 3)
