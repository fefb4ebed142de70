"""A front and its engines: none there, refusals, leaving, silence, several fronts."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from actors.fleet.routers import build_router
from actors.scheduling.request import SamplingParams
from actors.transport.node_directory import this_node
from app.engine_client.client import EngineUnavailable, GenerationRequest, RequestRefused
from app.fleet.client import FleetClient
from app.fleet.finder import Finder
from tests.app.fleet.live.test_failover import at_rest, through
from tests.app.fleet.live.waiting import until
from tests.live.reference import expected, make_prompts

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]
MAX_TOKENS = 150
LENGTHS = (3, 17, 40, 60, 5, 81, 22, 9)


def plain(max_tokens: int = MAX_TOKENS) -> list[GenerationRequest]:
    return [
        GenerationRequest(f"r{number}", prompt, SamplingParams(max_tokens))
        for number, prompt in enumerate(make_prompts(LENGTHS))
    ]


def right() -> list[dict[int, list[Any]]]:
    """What plain transformers answers to `plain`."""
    return [{0: [*tokens, "length"]} for tokens in expected("llama", LENGTHS, MAX_TOKENS)]


async def test_without_engines_a_request_is_told_so_in_time(make_fleet: Any) -> None:
    fleet = await make_fleet(0, front={"start_within_s": 0.5})
    assert not fleet.front.is_ready()
    with pytest.raises(EngineUnavailable) as caught:
        fleet.front.card  # noqa: B018
    assert caught.value.retry_after_s > 0
    with pytest.raises(EngineUnavailable, match="no engine can serve now"):
        await through(fleet.front, plain()[:1])
    with pytest.raises(EngineUnavailable):
        await fleet.front.status()
    await fleet.add()
    await until(fleet.front.is_ready)
    answers, _ = await through(fleet.front, plain())
    assert answers == right()
    await at_rest(fleet.front)
    await fleet.engines[0].close()


async def test_streams_of_the_only_engine_wait_for_its_successor(make_fleet: Any) -> None:
    fleet = await make_fleet(1)
    before = (await fleet.front.status())["engines"][0]
    answers, _ = await through(fleet.front, plain(), lambda: os.kill(before["pid"], signal.SIGKILL))
    assert answers == right()
    # The streams may have ended before the kill.
    await until(lambda: any(s.engine_id != before["id"] for s in fleet.front.snapshots))
    await at_rest(fleet.front)


async def test_a_frozen_engine_is_taken_for_dead(
    make_fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.fleet.client._SILENT_AFTER_S", 3.0)
    fleet = await make_fleet(2)
    pid = await fleet.pid(1)
    answers, _ = await through(fleet.front, plain(), lambda: os.kill(pid, signal.SIGSTOP))
    assert answers == right()
    os.kill(pid, signal.SIGKILL)


async def test_an_engine_that_leaves_hands_its_streams_over(make_fleet: Any) -> None:
    fleet = await make_fleet(2)
    leaving: list[asyncio.Task[None]] = []

    def leave() -> None:
        leaving.append(asyncio.create_task(fleet.engines[0].leave()))

    answers, _ = await through(fleet.front, plain(), leave)
    assert answers == right()
    await asyncio.wait_for(leaving[0], 60)
    await fleet.engines[0].close()
    await until(lambda: fleet.front.num_engines == 1)
    answers, _ = await through(fleet.front, plain())  # the other takes all
    assert answers == right()


@pytest.mark.long
async def test_streams_of_the_last_engine_end_there_when_it_leaves(make_fleet: Any) -> None:
    fleet = await make_fleet(1, front={"start_within_s": 0.5})
    leaving: list[asyncio.Task[None]] = []

    def leave() -> None:
        leaving.append(asyncio.create_task(fleet.engines[0].leave()))

    answers, _ = await through(fleet.front, plain(), leave)
    assert answers == right()
    await asyncio.wait_for(leaving[0], 60)
    assert not fleet.front.is_ready()
    with pytest.raises(EngineUnavailable):
        await through(fleet.front, plain()[:1])


@pytest.mark.long
async def test_what_one_engine_refuses_another_takes(make_fleet: Any) -> None:
    narrow = {"max_requests": 1, "max_queued_requests": 1}
    fleet = await make_fleet(2, scheduling=narrow)
    requests = plain()[:4]  # two for each: one runs, one waits
    answers, _ = await through(fleet.front, requests)
    assert answers == right()[:4]
    results = await asyncio.gather(
        *[through(fleet.front, [request]) for request in plain()], return_exceptions=True
    )
    refused = [result for result in results if isinstance(result, RequestRefused)]
    assert 0 < len(refused) < len(results)
    assert all(refusal.retry_after_s is not None for refusal in refused)
    assert not [r for r in results if isinstance(r, Exception) and r not in refused]
    await at_rest(fleet.front)


async def test_a_prompt_that_no_engine_can_hold_is_refused_at_once(make_fleet: Any) -> None:
    fleet = await make_fleet(1, kv={"block_size": 4, "memory_gib": 0.0001})
    num_held = (await fleet.front.status())["num_blocks"] * 4
    assert num_held < 250
    prompt = tuple(range(num_held + 1))
    with pytest.raises(RequestRefused) as caught:
        await through(fleet.front, [GenerationRequest("r", prompt, SamplingParams(1))])
    assert caught.value.param == "prompt"


async def test_two_fronts_share_an_engine_and_one_of_them_dies(make_fleet: Any) -> None:
    fleet = await make_fleet(1)
    finder = Finder(fleet.registry, this_node())
    other = FleetClient(finder, "tiny", str(fleet.folder), build_router("least_loaded"))
    await other.start()
    assert other.is_ready()  # it knows the engines before it answers any client
    endless = GenerationRequest("e", (5, 6), SamplingParams(200, min_tokens=200))
    async with aclosing(other.generate(endless)) as chunks:
        await anext(chunks)
        mine = asyncio.create_task(through(fleet.front, plain()))
        await other.close()  # its connection ends, and with it what it had asked for
        assert (await mine)[0] == right()
    await at_rest(fleet.front)


async def test_changes_made_live_reach_all_engines_and_those_that_join(make_fleet: Any) -> None:
    fleet = await make_fleet(1)
    with pytest.raises(RequestRefused) as caught:
        await fleet.front.reconfigure({"polic": "orca"})
    assert "polic" in str(caught.value)
    await fleet.front.reconfigure({"policy": "vllm"})
    late = await fleet.add()
    for _ in range(500):
        if (await late.status())["policy"] == "vllm":
            break
        await asyncio.sleep(0.02)  # polling, bounded
    assert {(await e.status())["policy"] for e in fleet.engines} == {"vllm"}
    await late.close()


async def test_a_reset_reaches_the_cache_of_every_engine(make_fleet: Any) -> None:
    fleet = await make_fleet(2, routing="round_robin")
    prompt = make_prompts((60,))[0]

    async def num_cached(count: int) -> list[int]:
        found = []
        for number in range(count):
            asked = GenerationRequest(f"r{number}", prompt, SamplingParams(1))
            async with aclosing(fleet.front.generate(asked)) as chunks:
                found += [chunk.num_cached_tokens async for chunk in chunks if chunk.tokens]
        return found

    assert [bool(number) for number in await num_cached(4)] == [False, False, True, True]
    stream = asyncio.create_task(through(fleet.front, plain()))
    await until(lambda: fleet.front.connections[0].fleet_requests)
    await fleet.front.reset_prefix_cache()
    assert [bool(number) for number in await num_cached(4)] == [False, False, True, True]
    assert (await stream)[0] == right()
    await at_rest(fleet.front)


@pytest.mark.parametrize("said", [b"x" * 32, b""])
async def test_an_intruder_is_let_in_nowhere(
    make_fleet: Callable[..., Any], said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from actors.transport.messages import Hello, pack_kind
    from actors.transport.wire import connect

    monkeypatch.setattr("actors.transport.wire._SECRET_WAIT_S", 0.5)
    fleet = await make_fleet(1)
    (engine_id,) = await fleet.registry.ids()
    entry = await fleet.registry.get(engine_id)
    frames: list[bytes] = []
    gone = asyncio.Event()
    socket = await connect(entry.local, frames.append, gone.set, said)
    if said:
        socket.send(pack_kind(Hello(0.0)))
    await asyncio.wait_for(gone.wait(), 30)
    assert frames == []


async def test_a_conversation_goes_where_the_states_of_its_last_turn_are(
    make_fleet: Any, tiny_model: Callable[..., Path]
) -> None:
    """Of a model whose layers keep states; both engines have some of the first turns."""
    fleet = await make_fleet(2, tiny_model("lfm2"), routing="prefix")
    found: list[int] = []

    async def turn(prompt: Sequence[int]) -> list[int]:
        answer: list[int] = []
        asked = GenerationRequest("t", tuple(prompt), SamplingParams(20, min_tokens=20))
        async for chunk in fleet.front.generate(asked):
            found.append(chunk.num_cached_tokens)
            answer += chunk.tokens
        return [*prompt, *answer]

    texts = await asyncio.gather(*[turn(prompt) for prompt in make_prompts((25, 41, 30, 33))])
    # An engine at rest publishes its last steps within a second.
    await until(lambda: all(one.num_prefilled_tokens for one in fleet.front.snapshots))
    assert not any(found)
    for text, position in zip(texts, (24, 40, 28, 32), strict=True):
        found.clear()
        await turn([*text, 7, 8, 9])
        assert max(found) == position
