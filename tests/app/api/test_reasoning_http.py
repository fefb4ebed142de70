"""Reasoning and tool calls of the families through the API, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.scheduling.request import Frame
from app.text.processor import TextProcessor
from tests.app.api.conftest import MODEL, Server, StartServer
from tests.app.text.families import family_folder

HELLO = [{"role": "user", "content": "Hi"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
        },
    },
}
ARGUMENTS = '{"a": 1, "b": "xyz"}'
ANSWERS = {
    "qwen3": f'<think>\nHm.\n</think>\n\nSo:<tool_call>{{"name": "add", "arguments": {ARGUMENTS}}}'
    "</tool_call>",
    "gpt_oss": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>So:<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    f"<|constrain|>json<|message|>{ARGUMENTS}<|call|>",
    "magistral": f"[THINK]Hm.[/THINK]So:[TOOL_CALLS]add[ARGS]{ARGUMENTS}",
    "apertus": "<|inner_prefix|>Hm.<|inner_suffix|>So:<|tools_prefix|>"
    f'[{{"add": {ARGUMENTS}}}]<|tools_suffix|>',
    "deepseek_v32": '<think>Hm.</think>So:<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n'
    '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="b" string="true">xyz</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "solar_open": "<|think|>Hm.<|end|><|begin|>assistant<|content|>So:<|end|><|begin|>assistant"
    "<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>add<|tool_call:args|>"
    f"{ARGUMENTS}<|tool_call:end|><|calls|>",
}
ENDS = {  # of the reasoning
    "qwen3": "</think>",
    "gpt_oss": "Hm.<|end|>",
    "magistral": "[/THINK]",
    "apertus": "<|inner_suffix|>",
    "deepseek_v32": "</think>",
    "solar_open": "Hm.<|end|>",
}
OfFamily = Callable[[str], TextProcessor]


@pytest.fixture(scope="module")
def of_family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OfFamily]:
    made: dict[str, TextProcessor] = {}

    def make(family: str) -> TextProcessor:
        if family not in made:
            folder = Path(tmp_path_factory.mktemp(family))
            made[family] = TextProcessor(family_folder(folder, family))
        return made[family]

    yield make
    for processor in made.values():
        processor.close()


def write(server: Server, processor: TextProcessor, text: str) -> int:
    """The engine answers with this text and the end token; how many tokens that are."""
    tokens = [*processor.encode_now(text), server.engine.card.eos_token_ids[0]]
    server.engine.script = lambda request, index: tokens
    return len(tokens)


@pytest.mark.parametrize("chunk_size", [1, 3])
@pytest.mark.parametrize("family", sorted(ANSWERS))
async def test_reasoning_and_calls_streamed_and_whole(
    start_server: StartServer, of_family: OfFamily, family: str, chunk_size: int
) -> None:
    processor = of_family(family)
    server = await start_server(processor=processor)
    server.engine.chunk_size = chunk_size
    num_tokens = write(server, processor, ANSWERS[family])
    request: dict[str, Any] = {"model": MODEL, "messages": HELLO, "tools": [ADD]}
    answer = (await server.http.post("/v1/chat/completions", json=request)).json()
    (choice,) = answer["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "So:")
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": ARGUMENTS}
    assert choice["finish_reason"] == "tool_calls"
    usage = answer["usage"]
    assert usage["completion_tokens"] == num_tokens
    end = ENDS[family]
    until_end = ANSWERS[family][: ANSWERS[family].index(end) + len(end)]
    num_reasoning = len(processor.encode_now(until_end))
    assert usage["completion_tokens_details"] == {"reasoning_tokens": num_reasoning}

    stream = await server.openai.chat.completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert (reasoning, "".join(delta.content or "" for delta in deltas)) == ("Hm.", "So:")
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [call.function.name for call in calls if call.id] == ["add"]
    arguments = [call.function.arguments for call in calls]
    assert "".join(arguments) == ARGUMENTS
    assert len(arguments) >= 2  # each as it was whole
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == num_reasoning


@pytest.mark.parametrize(
    ("family", "written", "shown"),
    [
        ("qwen3", "<think>Hm.</think>\n\n<unseen>Yes é <tool_call>.", "Yes é <tool_call>."),
        (
            "gpt_oss",
            "<|channel|>commentary<|message|>Yes.<|end|><|start|>assistant<|channel|>analysis"
            "<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>No.",
            "Yes.\nNo.",
        ),
    ],
)
async def test_plain_text_behind_the_reasoning_and_before_more(
    start_server: StartServer, of_family: OfFamily, family: str, written: str, shown: str
) -> None:
    processor = of_family(family)
    server = await start_server(processor=processor)
    num_tokens = write(server, processor, written)
    counted: Any = {"include_usage": True, "continuous_usage_stats": True}
    for options in (None, counted):
        stream = await server.openai.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options=options
        )
        chunks = [chunk async for chunk in stream]
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == shown
        if options:
            counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
            assert counts == [1, *range(1, num_tokens + 1), num_tokens]
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert reasoning == "Hm."


async def test_a_prompt_that_begins_the_reasoning(
    start_server: StartServer, of_family: OfFamily
) -> None:
    processor = of_family("r1")
    server = await start_server(processor=processor)
    write(server, processor, "Hm.\n</think>\n\nYes.")
    request: dict[str, Any] = {"model": MODEL, "messages": HELLO}
    answer = (await server.http.post("/v1/chat/completions", json=request)).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    write(server, processor, 'Hm.\n</think>\n\n{"a": 1}')
    request["response_format"] = {"type": "json_object"}
    answer = (await server.http.post("/v1/chat/completions", json=request)).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", '{"a": 1}')
    assert frame_of(server) == Frame(("<think>", "</think>"), is_begun=True)


def frame_of(server: Server) -> Frame | None:
    """Of the last request's grammar."""
    grammar = server.engine.seen[-1].sampling.grammar
    assert grammar is not None
    return grammar.frame


_SUM: dict[str, Any] = {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}
_JSON, _CALL = '{"a": 1}', '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("text", [_JSON, _CALL])
async def test_a_format_is_of_the_answer_alone(
    start_server: StartServer, of_family: OfFamily, is_on: bool, text: str
) -> None:
    """Reasoning comes before it, and calls may take its place."""
    processor = of_family("qwen3")
    server = await start_server(processor=processor)
    write(server, processor, f"<think>\nHm.\n</think>\n\n{text}" if is_on else text)
    request: dict[str, Any] = {
        "model": MODEL,
        "messages": HELLO,
        "tools": [{"type": "function", "function": _SUM}],
        "response_format": {"type": "json_object"},
        "chat_template_kwargs": {"enable_thinking": is_on},
    }
    answer = (await server.http.post("/v1/chat/completions", json=request)).json()
    message = answer["choices"][0]["message"]
    assert message.get("reasoning_content") == ("Hm." if is_on else None)
    if text == _JSON:
        assert message["content"] == _JSON
        assert not message.get("tool_calls")
    else:
        assert [c["function"]["name"] for c in message["tool_calls"]] == ["add"]
    frame = frame_of(server)
    assert frame is not None
    assert frame.reasoning == (("<think>", "</think>") if is_on else ())
    assert frame.calls == ("<tool_call>",)
    request["response_format"] = {"type": "grammar", "grammar": 'root ::= "{" [^}]* "}"'}
    assert (await server.http.post("/v1/chat/completions", json=request)).status_code == 200
    assert frame_of(server) is None


@pytest.mark.parametrize(
    ("family", "given", "shown"),
    [
        ("qwen3", {"reasoning_effort": "none"}, "<think>\n\n</think>"),
        ("qwen3", {"chat_template_kwargs": {"enable_thinking": False}}, "<think>\n\n</think>"),
        ("qwen3", {"reasoning_effort": "high"}, "assistant\n"),
        ("qwen3", {"reasoning_effort": "max"}, "assistant\n"),
        ("gpt_oss", {"reasoning_effort": "high"}, "Reasoning: high"),
        ("gpt_oss", {"chat_template_kwargs": {"reasoning_effort": "low"}}, "Reasoning: low"),
    ],
)
async def test_effort_reaches_the_template(
    start_server: StartServer, of_family: OfFamily, family: str, given: Any, shown: str
) -> None:
    processor = of_family(family)
    server = await start_server(processor=processor)
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 1, **given}
    assert (await server.http.post("/v1/chat/completions", json=body)).status_code == 200
    prompt = processor.decode(server.engine.seen[-1].prompt, skip_special_tokens=False)
    assert shown in prompt
    assert ("</think>" in prompt) == ("</think>" in shown)
    if "reasoning_effort" in given:
        body = {"model": MODEL, "input": "Hi", "reasoning": {"effort": given["reasoning_effort"]}}
        assert (await server.http.post("/v1/responses", json=body)).status_code == 200
        assert server.engine.seen[-1].prompt == server.engine.seen[-2].prompt


@pytest.mark.parametrize(
    ("family", "given", "param"),
    [
        ("hermes", {"reasoning_effort": "none"}, "reasoning_effort"),
        ("magistral", {"reasoning_effort": "low"}, "reasoning_effort"),
        ("gpt_oss", {"reasoning_effort": "xhigh"}, "reasoning_effort"),
        ("gpt_oss", {"reasoning_effort": "none"}, "reasoning_effort"),
        ("gpt_oss", {"reasoning_effort": "minimal"}, "reasoning_effort"),
        (
            "gpt_oss",  # which reads a message's thinking, and no such variable
            {"chat_template_kwargs": {"thinking": False}},
            "chat_template_kwargs.thinking",
        ),
        ("qwen3", {"reasoning_effort": "much"}, "reasoning_effort"),
        (
            "hermes",
            {"chat_template_kwargs": {"enable_thinking": True}},
            "chat_template_kwargs.enable_thinking",
        ),
        ("qwen3", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ],
)
async def test_an_effort_or_a_variable_that_does_nothing_is_refused(
    start_server: StartServer, of_family: OfFamily, family: str, given: Any, param: str
) -> None:
    server = await start_server(processor=of_family(family))
    body = {"model": MODEL, "messages": HELLO, **given}
    answer = await server.http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_an_item_of_responses(
    start_server: StartServer, of_family: OfFamily, stream: bool
) -> None:
    processor = of_family("qwen3")
    server = await start_server(processor=processor)
    write(server, processor, ANSWERS["qwen3"])
    tool = {"type": "function", **ADD["function"]}  # type: ignore[dict-item]
    request: dict[str, Any] = {"model": MODEL, "input": "Hi", "tools": [tool]}
    if stream:
        async with server.openai.responses.stream(**request) as events:
            found = await events.get_final_response()
    else:
        found = await server.openai.responses.create(**request)
    thought, message, call = found.output
    assert thought.content[0].text == "Hm."
    assert message.content[0].text == "So:"
    assert (call.name, call.arguments) == ("add", ARGUMENTS)
    assert found.usage.output_tokens_details.reasoning_tokens > 3
    items = [thought.model_dump(), message.model_dump(), call.model_dump()]
    again = await server.openai.responses.create(
        model=MODEL, input=[*items, {"role": "user", "content": "And?"}]
    )
    assert again.status == "completed"


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_of_a_kind_are_lines_of_one_text_or_items_of_their_own(
    start_server: StartServer, of_family: OfFamily, stream: bool
) -> None:
    processor = of_family("gpt_oss")
    server = await start_server(processor=processor)
    next_one = "<|end|><|start|>assistant<|channel|>"
    write(
        server,
        processor,
        f"<|channel|>analysis<|message|>Hm.{next_one}commentary<|message|>So:{next_one}analysis"
        f"<|message|>Or{next_one}analysis<|message|>not.{next_one}final<|message|>Yes.",
    )
    body = {"model": MODEL, "stream": stream}

    async def final(path: str, **fields: Any) -> list[Any]:
        answer = await server.http.post(path, json={**body, **fields})
        assert answer.status_code == 200, answer.text
        if not stream:
            return [answer.json()]
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        return [json.loads(line) for line in lines]

    found = await final("/v1/chat/completions", messages=HELLO)
    parts = [one["choices"][0]["delta" if stream else "message"] for one in found]
    for key, wanted in (("content", "So:\nYes."), ("reasoning_content", "Hm.\nOr\nnot.")):
        assert "".join(part.get(key) or "" for part in parts) == wanted

    found = await final("/v1/responses", input="Hi")
    items = (found[-1]["response"] if stream else found[-1])["output"]
    texts = [(item["type"], item["content"][0]["text"]) for item in items]
    assert texts == [
        ("reasoning", "Hm."),
        ("message", "So:"),
        ("reasoning", "Or\nnot."),
        ("message", "Yes."),
    ]

    found = await final("/v1/messages", messages=HELLO, max_tokens=999)
    if stream:
        deltas = [one for one in found if one["type"] == "content_block_delta"]
        shown = [""] * 4
        for one in deltas:
            delta = one["delta"]
            shown[one["index"]] += delta.get("text", "") + delta.get("thinking", "")
    else:
        shown = [block[block["type"]] for block in found[0]["content"]]
    assert shown == ["Hm.", "So:", "Or\nnot.", "Yes."]


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_clients_need_not_see_what_a_model_thinks(
    start_server: StartServer, of_family: OfFamily, stream: bool
) -> None:
    """gpt-oss always thinks: where thinking is disabled with the least effort."""
    processor = of_family("gpt_oss")
    server = await start_server(processor=processor)
    server.engine.chunk_size = 1000
    for thinking, effort, is_shown in (
        ({"type": "disabled"}, "low", False),
        ({"type": "adaptive", "display": "omitted"}, "medium", False),
        ({"type": "adaptive"}, "medium", True),
    ):
        write(server, processor, ANSWERS["gpt_oss"].partition(" to=functions.add")[0])
        body = {"model": MODEL, "max_tokens": 100, "messages": HELLO, "thinking": thinking}
        answer = await server.http.post("/v1/messages", json={**body, "stream": stream})
        assert answer.status_code == 200, answer.text
        assert ("Hm." in answer.text) is is_shown
        assert "So:" in answer.text
        prompt = processor.decode(server.engine.seen[-1].prompt, skip_special_tokens=False)
        assert f"Reasoning: {effort}" in prompt


@pytest.mark.parametrize("effort", ["low", "high", "max"])
@pytest.mark.parametrize("family", ["hermes", "magistral", "gpt_oss"])
async def test_an_effort_of_anthropics_clients_is_a_hint(
    start_server: StartServer, of_family: OfFamily, family: str, effort: str
) -> None:
    """Claude Code sends one with every request, whatever the model."""
    processor = of_family(family)
    server = await start_server(processor=processor)
    body = {"model": MODEL, "max_tokens": 1, "messages": HELLO, "thinking": {"type": "adaptive"}}
    hinted = {**body, "output_config": {"effort": effort}}
    for request in (body, hinted):
        answer = await server.http.post("/v1/messages", json=request)
        assert answer.status_code == 200, answer.text
    plain, with_effort = (
        processor.decode(seen.prompt, skip_special_tokens=False) for seen in server.engine.seen
    )
    shown = "low" if effort == "low" else "high"  # the most that gpt-oss knows
    assert with_effort == plain.replace("Reasoning: medium", f"Reasoning: {shown}")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 3])
@pytest.mark.parametrize(
    ("family", "written", "texts"),
    [
        ("qwen3", "<think>\nHm, well.\n</think>\n\nSo: yes", ["So: yes"]),
        (
            "qwen3",
            '<think>\nHm.\n</think>\n\nSo <tool_call>{"name": "add", "arguments": {"a": "no"}}'
            "</tool_call>\nno",
            ["So ", "no"],
        ),
        (
            "gpt_oss",
            "<|channel|>analysis<|message|>So<|end|><|start|>assistant<|channel|>final<|message|>So",
            ["So"],
        ),
    ],
    ids=["reasoning", "calls", "channels"],
)
async def test_log_probabilities_of_a_response_are_of_its_text(
    start_server: StartServer,
    of_family: OfFamily,
    family: str,
    written: str,
    texts: list[str],
    chunk_size: int,
    stream: bool,
) -> None:
    """Not of reasoning, calls and the marks between them, however the tokens come."""
    processor = of_family(family)
    server = await start_server(processor=processor)
    server.engine.chunk_size = chunk_size
    write(server, processor, written)
    include = ["message.output_text.logprobs"]
    asked: dict[str, Any] = {"model": MODEL, "input": "Hi", "include": include, "stream": stream}
    asked["tools"] = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]
    answer = await server.http.post("/v1/responses", json=asked)
    if stream:
        *_, last = (line for line in answer.text.splitlines() if line.startswith("data: {"))
        response = json.loads(last.removeprefix("data: "))["response"]
    else:
        response = answer.json()
    parts = [item["content"][0] for item in response["output"] if item["type"] == "message"]
    assert [part["text"] for part in parts] == texts
    assert ["".join(one["token"] for one in part["logprobs"]) for part in parts] == texts


async def test_thoughts_that_follow_each_other_are_lines_of_the_prompt(
    start_server: StartServer, of_family: OfFamily
) -> None:
    """Also before a call, as an answer with several of them is sent back."""
    processor = of_family("qwen3")
    server = await start_server(processor=processor)
    schema = {"type": "object", "properties": {}}
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        *({"type": "reasoning", "summary": [], "content": [_thought(t)]} for t in ("One.", "Two.")),
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
    ]
    tool: dict[str, Any] = {"type": "function", "name": "add", "parameters": schema}
    body: dict[str, Any] = {"model": MODEL, "input": items, "tools": [tool]}
    await server.http.post("/v1/responses", json={**body, "max_output_tokens": 1})
    blocks = [
        *({"type": "thinking", "thinking": t, "signature": ""} for t in ("One.", "Two.")),
        {"type": "tool_use", "id": "c", "name": "add", "input": {}},
    ]
    result = {"type": "tool_result", "tool_use_id": "c", "content": "3"}
    turns = [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    body = {"model": MODEL, "messages": [*HELLO, *turns], "max_tokens": 1}
    body["tools"] = [{"name": "add", "input_schema": schema}]
    await server.http.post("/v1/messages", json=body)
    assert len(server.engine.seen) == 2
    for request in server.engine.seen:
        prompt = processor.decode(request.prompt, skip_special_tokens=False)
        assert "<think>\nOne.\nTwo.\n</think>" in prompt


def _thought(text: str) -> dict[str, str]:
    return {"type": "reasoning_text", "text": text}
