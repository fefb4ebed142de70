"""Python callers: `serve.run(build_app(...))` and a streaming handle."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from app.main import build, build_app
from app.text.processor import TextProcessor
from tests.live.reference import MAX_TOKENS, expected, make_prompts

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def handle(own_serve: str, tiny_model: Callable[..., Path]) -> Iterator[Any]:
    """Of a model in an application whose ingress is a user's own."""
    from fastapi import FastAPI
    from fastapi.responses import StreamingResponse
    from ray import serve

    api = FastAPI()

    @serve.deployment(ray_actor_options={"num_cpus": 0})
    @serve.ingress(api)
    class Own:
        def __init__(self, model: Any) -> None:
            self.model = model

        @api.get("/tokens/{number}", response_model=None)
        async def tokens(self, number: int) -> StreamingResponse:
            asked = self.model.generate.options(stream=True)
            events = asked.remote([number, number + 1], max_tokens=9, ignore_eos=True)

            async def lines() -> Any:
                async for event in events:
                    for token in event["tokens"]:
                        yield f"{token}\n"

            return StreamingResponse(lines())

    args = {
        "model": {"path": str(tiny_model("llama"))},
        "scheduling": {"token_budget": 64, "max_requests": 16},
        "kv": {"block_size": 4, "memory_gib": 0.01},
    }
    model = build(args, http=False, deployments={"LLMServer": {"num_replicas": 1}})
    serve.run(cast(Any, Own).bind(model), name="handle", route_prefix="/handle")
    yield serve.get_deployment_handle("LLMServer", "handle")
    serve.delete("handle")


@pytest.fixture(scope="module")
def fleet(own_serve: str, tiny_model: Callable[..., Path]) -> Iterator[Any]:
    """A front and its engine."""
    from ray import serve

    args = {
        "model": {"path": str(tiny_model("llama"))},
        "scheduling": {"token_budget": 64},
        "kv": {"block_size": 4, "memory_gib": 0.01},
        "fleet": {},
    }
    front = serve.run(build_app(args), name="fleet", route_prefix="/fleet")
    scheduler_of(front)
    yield front
    serve.delete("fleet")


def read(handle: Any, prompt: Any, **params: Any) -> list[dict[str, Any]]:
    return list(handle.generate.options(stream=True).remote(prompt, **params))


def whole(events: Iterable[dict[str, Any]]) -> tuple[list[int], str]:
    """Tokens and text, however many came together."""
    read = list(events)
    return [t for event in read for t in event["tokens"]], "".join(e["text"] for e in read)


def scheduler_of(front: Any) -> int:
    """Its process, once there is one."""
    end_s = time.monotonic() + 60
    while True:
        try:
            (engine,) = front.status.remote().result(timeout_s=30)["engines"]
        except Exception:  # no engine yet
            assert time.monotonic() < end_s, "no engine has joined"
            time.sleep(0.1)  # polling, bounded
        else:
            return int(engine["pid"])


def test_tokens_equal_transformers(handle: Any) -> None:
    for number in (0, 7, 39):
        events = read(handle, list(make_prompts()[number]), max_tokens=MAX_TOKENS, ignore_eos=True)
        tokens = [t for event in events for t in event["tokens"]]
        assert tokens == expected("llama")[number]
        assert [e["index"] for e in events] == sorted(e["index"] for e in events)
        assert events[-1]["finish_reason"] == "length"


def test_a_stream_goes_on_behind_delivered_tokens(handle: Any) -> None:
    """What a caller does after losing a replica: the same request, and what it already has."""
    prompt, tokens = list(make_prompts()[5]), expected("llama")[5]
    events = read(handle, prompt, max_tokens=MAX_TOKENS, ignore_eos=True, output=tuple(tokens[:6]))
    assert [t for event in events for t in event["tokens"]] == tokens[6:]
    assert events[0]["index"] == 6


def test_text_prompts_and_wrong_parameters(handle: Any) -> None:
    events = read(handle, "hello", max_tokens=4, ignore_eos=True)
    assert sum(len(e["tokens"]) for e in events) == 4
    with pytest.raises(Exception, match="unknown parameter 'max_token'"):
        read(handle, "hello", max_token=4)
    with pytest.raises(Exception, match="prompt: must hold at least one token"):
        read(handle, [])


def test_a_users_own_ingress_streams_what_the_model_tells(own_serve: str, handle: Any) -> None:
    answer = httpx.get(f"{own_serve}/handle/tokens/5", timeout=60)
    assert answer.status_code == 200, answer.text
    alone = read(handle, [5, 6], max_tokens=9, ignore_eos=True)
    assert [int(line) for line in answer.text.split()] == whole(alone)[0]
    assert httpx.get(f"{own_serve}/handle/v1/models", timeout=60).status_code == 404


MESSAGES = [{"role": "user", "content": "What is a stall?"}]


def test_chat_is_generation_behind_the_rendered_conversation(
    handle: Any, tiny_model: Callable[..., Path]
) -> None:
    text = TextProcessor(str(tiny_model("llama")))
    tokens = text.encode_now(text.template.render(MESSAGES), add_special_tokens=False)
    text.close()
    told = list(handle.chat.options(stream=True).remote(MESSAGES, max_tokens=9, ignore_eos=True))
    assert whole(told) == whole(read(handle, tokens, max_tokens=9, ignore_eos=True))
    with pytest.raises(Exception, match="messages: must hold at least one"):
        list(handle.chat.options(stream=True).remote([]))


def test_embeddings(handle: Any) -> None:
    ask = lambda *args, **params: handle.embed.remote(*args, **params).result(timeout_s=60)  # noqa: E731
    vector, other = ask([5, 6, 7]), ask([5, 6, 8])
    assert math.isclose(math.fsum(v * v for v in vector), 1.0)
    assert vector == ask([5, 6, 7]) != other
    raw = ask([5, 6, 7], normalize=False)
    scale = math.hypot(*raw)
    assert vector == pytest.approx([v / scale for v in raw])
    with pytest.raises(Exception, match="pooling: mean or last"):
        ask([5], pooling="first")
    with pytest.raises(Exception, match="prompt: must hold at least one token"):
        ask([])


def test_callers_of_a_fleet_notice_no_death_of_an_engine(handle: Any, fleet: Any) -> None:
    """Two streams go on behind their tokens, and a caller after the death waits for the next."""
    (prompt,), (tokens,) = make_prompts((3,)), expected("llama", (3,), 150)
    params = {"max_tokens": 150, "ignore_eos": True}
    alone = list(handle.chat.options(stream=True).remote(MESSAGES, **params))
    pid = scheduler_of(fleet)
    streams = [
        fleet.generate.options(stream=True).remote(list(prompt), **params),
        fleet.chat.options(stream=True).remote(MESSAGES, **params),
    ]
    begun = [[next(stream)] for stream in streams]
    os.kill(pid, signal.SIGKILL)
    vector = fleet.embed.remote(list(prompt))
    told = [whole([*first, *stream]) for first, stream in zip(begun, streams, strict=True)]
    assert told[0][0] == tokens
    assert told[1] == whole(alone)
    expected_vector = handle.embed.remote(list(prompt)).result(timeout_s=60)
    assert vector.result(timeout_s=60) == expected_vector


def test_status_tells_the_engine_is_at_rest(handle: Any) -> None:
    status = handle.status.remote().result(timeout_s=30)
    assert status["num_free_blocks"] == status["num_blocks"]
    assert status["policy"] == "sarathi"
