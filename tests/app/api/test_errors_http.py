"""Whatever is wrong with a request is told with an OpenAI error object that names it."""

from __future__ import annotations

import gc
import json
from collections import Counter
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from app.api.batches.limits import BatchLimits
from app.api.events import ApiEvents, RequestInfo, RequestOutcome
from app.api.http.options import ApiOptions
from app.api.http.validation import complaint
from app.api.schema.completions import CompletionRequest
from app.engine_client.client import (
    EngineUnavailable,
    GenerationFailed,
    GenerationRequest,
    RequestRefused,
)
from tests.app.api.conftest import MODEL, Server, StartServer

JSON = {"content-type": "application/json"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


def check(answer: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] == param
    return dict(error)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"model": None, "prompt": "a"}, "model"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [97, -1]}, "prompt.1"),
        ({"prompt": [97, 10**9]}, "prompt"),
        ({"prompt": "a" * 5000}, "prompt"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": "a", "n": 10**9}, "n"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": -1}, "n"),
        ({"prompt": "a", "n": 2, "best_of": 1}, "best_of"),
        ({"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
        ({"prompt": ["a"] * 100, "n": 3}, "n"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
        ({"prompt": "a", "min_tokens": 17}, "min_tokens"),
        ({"prompt": "a", "temperature": 2.1}, "temperature"),
        ({"prompt": "a", "temperature": -0.1}, "temperature"),
        ({"prompt": "a", "repetition_penalty": 5e-324}, "repetition_penalty"),
        ({"prompt": "a", "top_p": 1.1}, "top_p"),
        ({"prompt": "a", "top_k": -2}, "top_k"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "n": 64, "max_tokens": 200, "logprobs": 20}, "logprobs"),
        ({"prompt": ["a" * 1000] * 10, "echo": True, "logprobs": 20, "stream": True}, "logprobs"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"99999": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"97": 101}}, "logit_bias.97"),
        ({"prompt": "a", "stop": ""}, "stop"),
        ({"prompt": "a", "stop": ["x"] * 17}, "stop"),
        ({"prompt": "a", "stop": "x" * 257}, "stop"),
        ({"prompt": "a", "stop_token_ids": [10**7]}, "stop_token_ids"),
        ({"prompt": "a", "seed": 2**63}, "seed"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "nonsense": 1}, "nonsense"),
        ({"prompt": "a", "stream_options": {"x": 1}}, "stream_options.x"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "stream": False, "stream_options": {}}, "stream_options"),
        (
            {
                "prompt": "a",
                "stream": True,
                "stream_options": {"continuous_usage_stats": True},
            },
            "stream_options",
        ),
        ({"prompt": "a", "slo": {"tbt_ms": 0}}, "slo.tbt_ms"),
        ({"prompt": "a", "guided_regex": "(["}, "guided_regex"),
        ({"prompt": "a", "guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"prompt": "a", "guided_regex": "a" * 70_000}, "guided_regex"),
        ({"prompt": "a", "structured_outputs": {"regex": "(["}}, "structured_outputs.regex"),
        ({"prompt": "a", "structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        (
            {"prompt": "a", "guided_regex": "a", "structured_outputs": {"choice": ["b"]}},
            "structured_outputs.choice",
        ),
        ({"prompt": "a", "response_format": {"type": "json_schema"}}, None),
        ({"prompt": "a", "user": "u" * 257}, "user"),
    ],
)
async def test_wrong_completions_name_the_parameter(
    server: Server, body: Any, param: str | None
) -> None:
    answer = await server.http.post("/v1/completions", json={"model": MODEL, **body})
    if param is None:
        param = "response_format.json_schema"
    check(answer, 400, param)
    assert server.engine.seen == []


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.type",
        ),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages.0.tool_call_id"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 20, "n": 64, "max_tokens": 200}, "logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"functions": []}, "functions"),
        ({"audio": {}}, "audio"),
        ({"moderation": {"model": "omni-moderation-latest"}}, "moderation"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"n": 65}, "n"),
    ],
)
async def test_wrong_chats_name_the_parameter(server: Server, extra: Any, param: str) -> None:
    answer = await server.http.post("/v1/chat/completions", json={**CHAT, **extra})
    check(answer, 400, param)


async def test_an_object_is_asked_for_in_words_of_json(server: Server) -> None:
    answer = await server.http.post("/v1/chat/completions", json={**CHAT, "slo": 5})
    check(answer, 400, "slo")
    assert answer.json()["error"]["message"] == "Invalid 'slo': Input should be an object."


async def test_a_picture_is_refused_as_what_no_model_here_reads(server: Server) -> None:
    content = [{"type": "image_url", "image_url": {"url": "http://x"}}]
    for route, name in (("chat/completions", "messages"), ("responses", "input")):
        body = {"model": MODEL, name: [{"role": "user", "content": content}]}
        answer = await server.http.post(f"/v1/{route}", json=body)
        assert "the models here take text only" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("limits", "extra", "words"),
    [
        ({}, {"n": 65}, "64 continuations of a prompt are allowed (setting api.max_n)"),
        ({"max_continuations": 2}, {"n": 3}, "At most 2 continuations"),
        (
            {},
            {"logprobs": True, "top_logprobs": 21},
            "20 alternatives to a token are given (setting api.max_logprobs)",
        ),
        ({"max_logprob_entries": 1}, {"logprobs": True, "max_tokens": 2}, "max_logprob_entries"),
        ({"max_messages": 1}, {"messages": 2 * CHAT["messages"]}, "max_messages"),
        ({"max_tools": 0}, {"tools": [{"type": "function", "function": {"name": "a"}}]}, "tools"),
        ({"max_stops": 0}, {"stop": "a"}, "max_stops"),
        ({"max_stop_chars": 1}, {"stop": "ab"}, "max_stop_chars"),
        ({"max_stop_token_ids": 0}, {"stop_token_ids": [1]}, "max_stop_token_ids"),
        ({"max_logit_bias": 0}, {"logit_bias": {"1": 1}}, "max_logit_bias"),
        ({"max_grammar_chars": 1}, {"guided_regex": "ab"}, "max_grammar_chars"),
        (
            {"max_grammar_chars": 1},
            {
                "tools": [{"type": "function", "function": {"name": "a", "strict": True}}],
                "response_format": {"type": "regex", "pattern": "a"},
            },
            "The schemas of the tools are longer than 8 times 1 characters together",
        ),
        ({"max_json_nodes": 5}, {}, "max_json_nodes"),
        ({"max_header_count": 2}, {}, "max_header_count"),
        ({"max_header_bytes": 20}, {}, "max_header_bytes"),
    ],
)
async def test_a_limit_says_what_it_limits_and_which_setting_it_is(
    start_server: StartServer, limits: Any, extra: Any, words: str
) -> None:
    server = await start_server(ApiOptions(**limits))
    answer = await server.http.post("/v1/chat/completions", json={**CHAT, **extra})
    message = answer.json()["error"]["message"]
    assert words in message
    for name in limits:
        assert f"(setting api.{name})" in message


async def test_a_limit_of_prompts_names_its_setting(start_server: StartServer) -> None:
    server = await start_server(ApiOptions(max_prompts=1, max_embedding_inputs=1))
    for path, key, name in (
        ("/v1/completions", "prompt", "max_prompts"),
        ("/v1/embeddings", "input", "max_embedding_inputs"),
    ):
        answer = await server.http.post(path, json={"model": MODEL, key: ["a", "b"]})
        words = f"At most 1 {key}s are allowed (setting api.{name})"
        assert words in answer.json()["error"]["message"]


async def test_a_body_that_is_nested_too_deep_is_told_how_deep_it_may_be(server: Server) -> None:
    for depth, is_read in ((200, True), (202, False)):
        nested = b"[" * (depth - 1) + b"]" * (depth - 1)
        body = b'{"model": "' + MODEL.encode() + b'", "prompt": "a", "metadata": ' + nested + b"}"
        answer = await server.http.post("/v1/completions", content=body, headers=JSON)
        says_so = "'metadata': objects and lists may be nested 200 deep" in answer.text
        assert says_so is not is_read


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"null", None),
        (b"[]", None),
        (b'"x"', None),
        (b'{"model": "tiny", "prompt": "\xff"}', "prompt"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "prompt"),
        (b'{"model": "tiny",\n "stop": ["a: \\"b\\": \\ud800 {"], "prompt": "\\n:"}', "stop"),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"model": "tiny", "prompt": "a", "temperature": Infinity}', "temperature"),
        (b'{"model": "tiny", "prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"model": "tiny", "prompt": "a", "logit_bias": {"97": -Infinity}}', "logit_bias.97"),
        (b'{"model": "tiny", "prompt": "a", "guided_json": {"maximum": NaN}}', "guided_json"),
        (b'{"model": "tiny", "prompt": ' + b"[" * 100_000, "prompt"),
        (b'{"model": "tiny", "prompt": "a", "metadata": ' + b'{"a":' * 300, "metadata"),
        (
            b'{"model": "tiny", "prompt": "a", "guided_json": [' + b"{}," * 30_000 + b"{}]}",
            "guided_json",
        ),
        (b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", None),
    ],
)
async def test_malformed_bodies(server: Server, content: bytes, param: str | None) -> None:
    answer = await server.http.post("/v1/completions", content=content, headers=JSON)
    check(answer, 400, param)


FUNCTION = b'{"type": "function", "name": "f", "%s": {"a": 1e999}}'


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (b'"tools": [%s]' % (FUNCTION % b"output_schema"), "tools"),
        (
            b'"tools": [%s, {"type": "function", "name": "g"}], "tool_choice": {"type": '
            b'"allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}'
            % (FUNCTION % b"parameters"),
            "tools",
        ),
        (b'"text": {"format": {"type": "text", "schema": {"a": [NaN]}}}', "text.format.schema"),
    ],
)
@pytest.mark.parametrize("stream", [b"true", b"false"])
async def test_a_response_is_asked_to_repeat_no_number_that_json_lacks(
    server: Server, fields: bytes, param: str, stream: bytes
) -> None:
    """Of tools that the model does not see as well."""
    body = b'{"model": "tiny", "input": "a", "stream": %s, %s}' % (stream, fields)
    check(await server.http.post("/v1/responses", content=body, headers=JSON), 400, param)


@pytest.mark.parametrize("given", [{}, {"regex": None}, {"regex": "a", "json": {}}])
async def test_structured_outputs_are_of_one_kind(server: Server, given: Any) -> None:
    body = {"model": MODEL, "prompt": "a", "structured_outputs": given}
    error = check(await server.http.post("/v1/completions", json=body), 400, "structured_outputs")
    assert "give exactly one of json, regex, choice and grammar" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "meant"),
    [
        ("/v1/completions", {"prompt": "a", "max_token": 1}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "slo": {"tbt": 1}}, "slo.tbt_ms"),
        ("/v1/chat/completions", {**CHAT, "max_completion_token": 1}, "max_completion_tokens"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "content": "a", "tool_call": []}]},
            "messages.0.tool_calls",
        ),
        ("/v1/chat/completions", {**CHAT, "xyz": []}, None),
        ("/v1/chat/completions", {**CHAT, "web_search": {}}, None),  # refused by name
        ("/v1/responses", {"input": "a", "max_tokens": 1}, "max_output_tokens"),
        ("/v1/messages", {**CHAT, "max_tokens": 1, "stop_sequence": []}, "stop_sequences"),
        ("/v1/messages", {**CHAT, "max_tokens": 1, "stop": []}, "stop_sequences"),
        ("/v1/files?ordr=asc", None, "order"),
    ],
)
async def test_an_unknown_parameter_brings_the_one_it_may_be_meant_to_be(
    start_server: StartServer, path: str, body: Any, meant: str | None
) -> None:
    server = await start_server(batches=BatchLimits())
    answer = await server.http.request(
        "POST" if body else "GET", path, json={"model": MODEL, **body} if body else None
    )
    assert answer.status_code == 400
    said = answer.json()["error"]["message"]
    assert "Unknown parameter: '" in said
    assert said.partition(" Did you mean ")[2] == (f"'{meant}'?" if meant else "")


class Looked(dict[str, Any]):
    """Counts how often a name is looked up."""

    num_times = 0

    def __contains__(self, key: object) -> bool:
        self.num_times += 1
        return super().__contains__(key)


@pytest.mark.parametrize("name", ["metadata", "logit_bias", "slo"])
def test_of_a_body_wrong_in_many_places_only_some_are_looked_at(name: str) -> None:
    content = {"model": MODEL, "prompt": "a", name: {f"k{i}": "x" for i in range(20_000)}}
    if name == "metadata":
        content[name] = dict.fromkeys(content[name], 1)
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate(content)
    assert caught.value.error_count() == 20_000
    looked = Looked(content)
    error = complaint(caught.value, looked, CompletionRequest)
    assert error.param == f"{name}.k0"
    assert looked.num_times < 2000


async def test_a_parameter_without_a_name_is_named_so(server: Server) -> None:
    body = {"model": MODEL, "prompt": "a", "": 1}
    error = check(await server.http.post("/v1/completions", json=body), 400, "")
    assert error["message"] == "Unknown parameter: ''."


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/models/", 404),
    ],
)
async def test_wrong_paths_and_methods(server: Server, method: str, path: str, status: int) -> None:
    answer = await server.http.request(method, path)
    error = check(answer, status, "model" if path.startswith("/v1/models/") else None)
    assert "''" not in error["message"]
    assert ("allow" in answer.headers) == (status == 405)


async def test_a_path_where_nothing_is_is_told_where_to_look(server: Server) -> None:
    answer = await server.http.get("/docs")
    assert answer.status_code == 404
    where = answer.json()["error"]["message"].partition("GET ")[2].split()[0]
    assert "/v1/models" in (await server.http.get(where)).json()["paths"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/embeddings", {"input": "Hi"}),
    ],
)
async def test_a_request_names_its_model(server: Server, path: str, body: Any) -> None:
    answer = await server.http.post(path, json=body)
    assert check(answer, 400, "model")["code"] == "missing_parameter"


async def test_wrong_model(server: Server) -> None:
    answer = await server.http.post("/v1/completions", json={"model": "gpt", "prompt": "a"})
    assert check(answer, 404, "model")["code"] == "model_not_found"


async def test_a_compressed_body_is_not_read_as_it_is(server: Server) -> None:
    content = json.dumps({"model": MODEL, "prompt": "a"}).encode()
    for encoding, status in (("gzip", 415), ("identity", 200)):
        headers = {**JSON, "content-encoding": encoding}
        answer = await server.http.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code == status


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_other_content_types(server: Server, content_type: str) -> None:
    headers = {"content-type": content_type} if content_type else {}
    answer = await server.http.post(
        "/v1/completions", content=b'{"model":"tiny","prompt":"a"}', headers=headers
    )
    check(answer, 415)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "retry", "said"),
    [
        (RequestRefused("too long", param="prompt"), 400, None, "Too long."),
        (RequestRefused("prompt is long.", param="prompt"), 400, None, "prompt is long."),
        (RequestRefused("max_n: too large", param="prompt"), 400, None, "max_n: too large."),
        (RequestRefused("overload", retry_after_s=2.5), 429, "3", "Overload."),
        (EngineUnavailable("loading", retry_after_s=5.0), 503, "5", "Loading."),
        (GenerationFailed("broken"), 500, None, "Broken."),
    ],
)
async def test_engine_refusals_have_their_status(
    server: Server, refusal: Exception, status: int, retry: str | None, said: str, stream: bool
) -> None:
    server.engine.refusal = refusal
    answer = await server.http.post(
        "/v1/completions", json={"model": MODEL, "prompt": "a", "stream": stream}
    )
    error = check(answer, status, "prompt" if status == 400 else None)
    assert error["message"] == said
    assert answer.headers.get("retry-after") == retry


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_a_failure_in_a_stream_is_an_event(server: Server, path: str) -> None:
    server.engine.fail_at = 2
    server.engine.failure = GenerationFailed("stage lost")
    body: dict[str, Any] = {"model": MODEL, "stream": True, "prompt": "a"}
    if path != "/v1/completions":
        body = {"stream": True, **(CHAT if "chat" in path else {"model": MODEL, "input": "Hi"})}
    answer = await server.http.post(path, json=body)
    events = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    last = json.loads(events[-2].removeprefix("data: "))
    if path == "/v1/responses":
        assert (last["type"], last["message"]) == ("error", "Stage lost.")
        failed = json.loads(events[-3].removeprefix("data: "))["response"]
        assert (failed["status"], failed["output"][0]["status"]) == ("failed", "incomplete")
    else:
        assert last["error"]["message"] == "Stage lost."


async def test_an_unforeseen_failure_tells_nothing_of_itself(server: Server) -> None:
    server.engine.refusal = RuntimeError("secret path")
    answer = await server.http.post("/v1/completions", json={"model": MODEL, "prompt": "a"})
    assert "secret" not in check(answer, 500)["message"]
    server.engine.refusal = None
    server.engine.fail_at = 2
    server.engine.failure = RuntimeError("secret path")
    answer = await server.http.post(
        "/v1/completions", json={"model": MODEL, "prompt": "a", "stream": True}
    )
    assert "secret" not in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
    assert '"server_error"' in answer.text


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
names = st.sampled_from(
    ["prompt", "messages", "input", "tools", "stop", "logit_bias", "response_format", "n", "slo"]
) | st.text(max_size=6)


async def test_no_body_breaks_the_server(start_server: StartServer) -> None:
    server = await start_server(ApiOptions())
    paths = [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/tokenize",
        "/detokenize",
    ]
    drawn: list[tuple[str, bytes]] = []

    @settings(max_examples=200, database=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(paths), st.dictionaries(names, values, max_size=4) | values)
    def draw(path: str, body: Any) -> None:
        drawn.append((path, json.dumps(body).encode()))

    @settings(max_examples=100, database=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(paths), st.binary(max_size=64))
    def draw_bytes(path: str, body: bytes) -> None:
        drawn.append((path, body))

    draw()
    draw_bytes()
    for path, body in drawn:
        answer = await server.http.post(path, content=body, headers=JSON)
        assert answer.status_code in (200, 400, 404), (path, body, answer.text)
        if answer.status_code != 200:
            assert answer.json()["error"]["message"]


class Ended(ApiEvents):
    """Keeps how requests ended."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int, str]] = []

    def on_finish(self, request: RequestInfo, outcome: RequestOutcome, now_s: float) -> None:
        self.found.append((request.num_prompt_tokens, outcome.status, outcome.reason))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["abc", "abcdef"], "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abcdef"}]}),
    ],
)
async def test_a_foreseen_refusal_never_reaches_the_engine_and_is_counted(
    start_server: StartServer,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    stream: bool,
) -> None:
    events = Ended()
    server = await start_server(events=events)
    error = RequestRefused("overloaded", retry_after_s=3.2)

    def foreseen(request: GenerationRequest) -> RequestRefused | None:
        return error if len(request.prompt) > 4 and request.objective.ttft_s == 1.0 else None

    monkeypatch.setattr(server.engine, "foreseen", foreseen)
    asked = {"model": MODEL, "stream": stream, **body}
    answer = await server.http.post(path, json={**asked, "slo": {"ttft_ms": 1000}})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "4")
    assert answer.json()["error"]["code"] == "overloaded"
    assert server.engine.seen == []
    assert [(status, reason) for _, status, reason in events.found] == [(429, "overloaded")]
    answer = await server.http.post(path, json={**asked, "slo": {"ttft_ms": 2000}})
    assert answer.status_code == 200


@pytest.mark.parametrize("status", [200, 429])
async def test_streams_leave_nothing_to_a_full_collection(server: Server, status: int) -> None:
    if status != 200:
        server.engine.refusal = RequestRefused("overloaded", retry_after_s=1.0)
    body = {"model": MODEL, "prompt": "abc", "stream": True}
    await server.http.post("/v1/completions", json=body)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(5):
            assert (await server.http.post("/v1/completions", json=body)).status_code == status
        server.engine.seen.clear()
        gc.collect()
        left = Counter(type(found).__name__ for found in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left["Generation"] == left["RequestRefused"] == left["Call"] == 0


async def test_a_strict_schema_is_kept_or_refused(server: Server) -> None:
    """A weaker one is served where it is not strict, as OpenAI does."""
    end_token = server.engine.card.eos_token_ids[0]
    server.engine.script = lambda request, index: [*b"[1, 1]", end_token]
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    for strict in (True, False, None):
        spec = {"name": "n", "schema": schema, "strict": strict}
        chat = {**CHAT, "response_format": {"type": "json_schema", "json_schema": spec}}
        response = {
            "model": MODEL,
            "input": "Hi",
            "text": {"format": {"type": "json_schema", **spec}},
        }
        for route, body, param in (
            ("chat/completions", chat, "response_format"),
            ("responses", response, "text.format"),
        ):
            answer = await server.http.post(f"/v1/{route}", json=body)
            if strict:
                error = check(answer, 400, param)
                assert error["code"] == "invalid_grammar"
                assert (
                    'cannot be held to this schema: Unimplemented keys: ["uniqueItems"]'
                    in (error["message"])
                )
            else:
                assert answer.status_code == 200
