"""Requests that wait, and streams, leave engines that serve; their bytes stay the same."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.fleet.snapshot import Role
from actors.scheduling.request import SamplingParams
from app.engine_client.client import GenerationRequest
from app.fleet.connection import Connection
from tests.app.fleet.live.test_draining import Hook
from tests.app.fleet.live.test_draining import before_asking as before_asking
from tests.app.fleet.live.test_draining import unhurried as unhurried
from tests.app.fleet.live.test_failover import OUTLASTS, mixed, through
from tests.app.fleet.live.test_split import all_at_rest
from tests.app.fleet.live.waiting import until
from tests.live.reference import expected, make_prompts
from tests.tiny_models import LASTING

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

LENGTH, MAX_TOKENS, NUM_WAITING = 40, 30, 12


@pytest.fixture
def is_late(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """However fast it is, the engine of this number has two streams too many, the others none."""

    def install(number: int) -> None:
        def num_excess(engine: Any) -> int:
            return 2 if engine.engine_id.startswith(f"replica-{number}.") else 0

        monkeypatch.setattr("actors.fleet.balance._num_excess", num_excess)
        monkeypatch.setattr("app.fleet.stream_placement.LOOKS_EVERY_S", 0.02)

    return install


@pytest.fixture
def lasting(
    tiny_model: Callable[..., Path], sections: dict[str, Any]
) -> tuple[Path, list[GenerationRequest]]:
    """A model, and requests whose streams no slow front sees end before they have moved."""
    sections["kv"]["memory_gib"] = 0.03
    return tiny_model("llama", **LASTING), mixed(OUTLASTS // 4)


async def rebalance(fleet: Any, requests: list[GenerationRequest], right: Any) -> None:
    """Serve the requests until streams of them have moved: a front that looks too late tries
    again."""
    fleet.front._placement._rebalances = True
    for _ in range(8):
        answers, _ = await through(fleet.front, requests)
        assert answers == right
        if (await fleet.front.status())["fleet"]["num_moves"]:
            return


@pytest.mark.parametrize(
    "roles", [(), pytest.param((Role.PREFILL, Role.DECODE), marks=pytest.mark.long)]
)
async def test_an_engine_that_joins_takes_over_what_waits(
    make_fleet: Callable[..., Any],
    sections: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    roles: tuple[Role, ...],
) -> None:
    """The first stands still until it does, and is taken to be late, however fast it is."""
    for name, value in (
        ("_wait_s", lambda engine: 1e6 * engine.engine_id.startswith("replica-0")),
        ("_is_better", lambda *situation: True),
        ("PATIENCE_S", 1e5),
    ):
        monkeypatch.setattr(f"actors.fleet.balance.{name}", value)
    sections["scheduling"]["max_requests"] = 2
    sections["engine"]["step_deadline_s"] = 200.0
    way = "split" if roles else ""
    fleet = await make_fleet(
        1, routing="slack", way=way, roles=roles, front={"rebalance": True}, **sections
    )
    prompts = make_prompts((LENGTH,) * NUM_WAITING)
    params = SamplingParams(MAX_TOKENS)
    requests = [GenerationRequest(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]
    (stage,) = (await fleet.engines[0].status())["stage_pids"][0]
    os.kill(stage, signal.SIGSTOP)  # before they come: none of them can end
    try:
        asked = asyncio.create_task(through(fleet.front, requests))
        await until(lambda: fleet.front.num_open == NUM_WAITING)
        await fleet.add(*roles[:1])
        await until(lambda: fleet.front.moves.num_balanced > 0)
    finally:
        os.kill(stage, signal.SIGCONT)
    answers, _ = await asked
    tokens = expected("llama", (LENGTH,) * NUM_WAITING, MAX_TOKENS)
    assert answers == [{0: [*own, "length"]} for own in tokens]
    shown = (await fleet.front.status())["fleet"]
    assert shown["num_balanced"] == shown["num_moves"] > 0
    await all_at_rest(fleet)


async def test_streams_leave_an_engine_that_misses_its_objective(
    make_fleet: Callable[..., Any],
    sections: dict[str, Any],
    is_late: Callable[[int], None],
    lasting: tuple[Path, list[GenerationRequest]],
    unhurried: None,
) -> None:
    is_late(0)
    folder, requests = lasting
    fleet = await make_fleet(2, folder, **sections)
    unfailed, _ = await through(fleet.front, requests)
    _, before = await all_at_rest(fleet)
    assert before["num_early_blocks"] == 0
    await rebalance(fleet, requests, unfailed)
    _, after = await all_at_rest(fleet)
    assert after["num_early_blocks"] > 0, "they were copied first"
    shown = (await fleet.front.status())["fleet"]
    assert shown["num_balanced"] == shown["num_moves"] > 0
    assert shown["num_inexact_moves"] == 0


# They move as those above; to which engine: tests/app/simulate/run/test_handover.py.
@pytest.mark.long
async def test_engines_that_decode_relieve_each_other(
    make_fleet: Callable[..., Any],
    sections: dict[str, Any],
    is_late: Callable[[int], None],
    lasting: tuple[Path, list[GenerationRequest]],
    unhurried: None,
) -> None:
    """And the one that computes their prompts gets none of their streams."""
    is_late(1)
    roles = (Role.PREFILL, Role.DECODE, Role.DECODE)
    folder, requests = lasting
    fleet = await make_fleet(0, folder, way="split", roles=roles, **sections)
    unfailed, _ = await through(fleet.front, requests)
    await rebalance(fleet, requests, unfailed)
    await all_at_rest(fleet)
    shown = (await fleet.front.status())["fleet"]
    assert shown["num_balanced"] == shown["num_moves"] > 0
    ways = {(m["from"].partition(".")[0], m["to"].partition(".")[0]) for m in shown["latest_moves"]}
    assert ways == {("replica-1", "replica-2")}


# The same copies as at a drain, where such deaths are tested in the short run too.
@pytest.mark.long
@pytest.mark.parametrize("who", ["target", "source"])
async def test_a_death_during_such_a_copy_loses_and_doubles_nothing(
    make_fleet: Callable[..., Any],
    sections: dict[str, Any],
    before_asking: Callable[[Hook], None],
    is_late: Callable[[int], None],
    lasting: tuple[Path, list[GenerationRequest]],
    who: str,
) -> None:
    is_late(0)
    folder, requests = lasting
    fleet = await make_fleet(3, folder, **sections)
    unfailed, _ = await through(fleet.front, requests)
    pids = {engine["id"]: engine["pid"] for engine in (await fleet.front.status())["engines"]}
    killed: list[str] = []

    async def kill(connection: Connection, question: str) -> None:
        if question == "kv_fetched" and not killed:
            killed.append(connection.engine_id if who == "target" else next(iter(pids)))
            os.kill(pids[killed[0]], signal.SIGKILL)

    before_asking(kill)
    fleet.front._placement._rebalances = True
    answers, _ = await through(fleet.front, requests)
    assert answers == unfailed
    assert killed
    assert fleet.front.num_open == 0
    await until(lambda: not fleet.front._placement._copies.open)
    await until(lambda: all(engine.is_ready() for engine in fleet.engines))
    await all_at_rest(fleet)
