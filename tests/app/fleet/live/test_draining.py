"""Streams of an engine that drains go on there until their KV is copied, and lose nothing, whoever
dies or ends meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.scheduling.request import SamplingParams
from app.engine_client.client import GenerationRequest
from app.fleet.connection import Connection
from tests.app.fleet.live.test_failover import OUTLASTS, Answer, mixed, through
from tests.app.fleet.live.test_split import all_at_rest
from tests.app.fleet.live.waiting import until
from tests.live.reference import expected, make_prompts
from tests.tiny_models import LASTING

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

LENGTH = 81
NUM_BLOCKS = LENGTH // 4
STEPS = ["kv_saved", "kv_fetched", "next_token"]  # of a copy, as a front asks for them
Hook = Callable[[Connection, str], Awaitable[None]]


def one(max_tokens: int) -> GenerationRequest:
    return GenerationRequest("one", make_prompts((LENGTH,))[0], SamplingParams(max_tokens))


def right(max_tokens: int) -> list[Answer]:
    (tokens,) = expected("llama", (LENGTH,), max_tokens, **LASTING)
    return [{0: [*tokens, "length"]}]


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, a stream is copied and no bound passes."""
    monkeypatch.setattr("app.fleet.routing.FINISHES_WITHIN_S", 0.0)
    for name in ("COPIED_WITHIN_S", "LAST_BLOCK_WITHIN_S", "COPIES_FOR_S"):
        monkeypatch.setattr(f"app.fleet.stream_copies.{name}", 60.0)


@pytest.fixture
def before_asking(monkeypatch: pytest.MonkeyPatch) -> Callable[[Hook], None]:
    """`before_asking(hook)`: called before a front asks an engine for a step of a copy."""
    ask = Connection.ask

    def install(hook: Hook) -> None:
        async def asked(self: Connection, question: Any, *arguments: Any, **more: Any) -> Any:
            if question in STEPS:
                await hook(self, question)
            return await ask(self, question, *arguments, **more)

        monkeypatch.setattr(Connection, "ask", asked)

    return install


def leaves(fleet: Any) -> tuple[Callable[[], None], list[asyncio.Task[None]]]:
    """(lets the first engine leave, what is done with that)."""
    leaving: list[asyncio.Task[None]] = []
    return lambda: leaving.append(asyncio.create_task(fleet.engines[0].leave())), leaving


async def test_a_stream_goes_on_until_all_but_its_last_tokens_are_there(
    make_fleet: Callable[..., Any],
    tiny_model: Callable[..., Path],
    sections: dict[str, Any],
    before_asking: Callable[[Hook], None],
    unhurried: None,
) -> None:
    fleet = await make_fleet(2, tiny_model("llama", **LASTING), **sections)
    asked: list[tuple[str, str]] = []

    async def note(connection: Connection, question: str) -> None:
        asked.append((connection.engine_id.rpartition(".")[0], question))

    before_asking(note)
    leave, leaving = leaves(fleet)
    answers, _ = await through(fleet.front, [one(OUTLASTS)], leave)
    assert answers == right(OUTLASTS)
    await asyncio.wait_for(leaving[0], 60)
    here, there = "replica-0", "replica-1"
    assert asked == [
        (here, "kv_saved"), (there, "kv_fetched"),
        (here, "kv_saved"), (there, "kv_fetched"), (here, "next_token"),
    ]  # fmt: skip
    (move,) = (await fleet.front.status())["fleet"]["latest_moves"]
    assert (await all_at_rest(fleet))[1]["num_early_blocks"] > NUM_BLOCKS
    assert move["num_tokens"] > LENGTH + 4, "it completed a block meanwhile"


@pytest.mark.parametrize(
    ("who", "step"),
    [
        ("target", "kv_fetched"),
        *(
            pytest.param(who, step, marks=pytest.mark.long)
            for who, step in (
                ("source", "kv_fetched"),
                ("its stage", "kv_fetched"),
                *itertools.product(("target", "source"), ("kv_saved", "next_token")),
            )
        ),
    ],
)
async def test_a_death_during_a_copy_loses_and_doubles_nothing(
    make_fleet: Callable[..., Any],
    sections: dict[str, Any],
    before_asking: Callable[[Hook], None],
    tiny_model: Callable[..., Path],
    unhurried: None,
    who: str,
    step: str,
) -> None:
    # Taken in turn, each engine has one stream that lasts: the others may end before one leaves.
    lasting = [replace(one(OUTLASTS), request_id=f"lasting{number}") for number in range(3)]
    requests = [*mixed(), *lasting]
    fleet = await make_fleet(3, tiny_model("llama", **LASTING), **sections)
    unfailed, _ = await through(fleet.front, requests)
    pids = {engine["id"]: engine["pid"] for engine in (await fleet.front.status())["engines"]}
    source = next(iter(pids))
    killed: list[str] = []

    async def kill(connection: Connection, question: str) -> None:
        if question == step and not killed:
            copied = fleet.front._placement._copies.open.values()
            target = next(r.receiver_id for r in copied)
            killed.append(target if who == "target" else source)
            stages = (await fleet.engines[0].status())["stage_pids"]
            pid = stages[0][0] if who == "its stage" else pids[killed[0]]
            os.kill(pid, signal.SIGKILL)

    before_asking(kill)
    leave, _ = leaves(fleet)
    answers, _ = await through(fleet.front, requests, leave)
    assert answers == unfailed
    assert killed
    assert fleet.front.num_open == 0
    await until(lambda: not fleet.front._placement._copies.open)
    await until(lambda: all(engine.is_ready() for engine in fleet.engines))
    await all_at_rest(fleet)


@pytest.mark.parametrize("how", ["completes", "is given up"])
async def test_a_stream_that_ends_during_its_copy_moves_nowhere(
    make_fleet: Callable[..., Any],
    tiny_model: Callable[..., Path],
    sections: dict[str, Any],
    before_asking: Callable[[Hook], None],
    unhurried: None,
    how: str,
) -> None:
    fleet = await make_fleet(2, tiny_model("llama", **LASTING), **sections)
    ended, begun = asyncio.Event(), asyncio.Event()

    async def wait(connection: Connection, question: str) -> None:
        if question == "kv_fetched":
            begun.set()
            await ended.wait()

    before_asking(wait)
    leave, leaving = leaves(fleet)
    if how == "completes":
        answers, _ = await through(fleet.front, [one(OUTLASTS)], leave)
        assert answers == right(OUTLASTS)
    else:
        async with aclosing(fleet.front.generate(one(OUTLASTS))) as chunks:
            await anext(chunks)
            leave()
            await begun.wait()
    assert begun.is_set()
    ended.set()
    await until(lambda: not fleet.front._placement._copies.open)
    await asyncio.wait_for(leaving[0], 60)
    assert fleet.front.num_open == 0
    assert (await fleet.front.status())["fleet"]["num_moves"] == 0
    _, target = await all_at_rest(fleet)
    assert target["num_early_blocks"] >= NUM_BLOCKS


async def test_a_fetch_that_does_not_end_delays_no_drain_for_long(
    make_fleet: Callable[..., Any],
    sections: dict[str, Any],
    before_asking: Callable[[Hook], None],
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.fleet.stream_copies.COPIED_WITHIN_S", 0.05)
    fleet = await make_fleet(2, tiny_model("llama", **LASTING), **sections)

    async def wait(connection: Connection, question: str) -> None:
        if question == "kv_fetched":
            await asyncio.Event().wait()

    before_asking(wait)
    leave, leaving = leaves(fleet)
    answers, _ = await through(fleet.front, [one(OUTLASTS)], leave)
    assert answers == right(OUTLASTS)
    await asyncio.wait_for(leaving[0], 60)
    assert (await fleet.front.status())["fleet"]["num_moves"] > 0
