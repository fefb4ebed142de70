"""KV that goes from device to device: the tokens are those of transformers, and either side's death
costs no more than a way through memory. The devices are CPUs, joined by gloo."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from actors.fleet.snapshot import Role
from tests.app.fleet.live.conftest import SHARE_BYTES
from tests.app.fleet.live.test_failover import mixed, through
from tests.app.fleet.live.test_split import all_at_rest, processes, struck
from tests.live.reference import ask, ask_all, expected, make_prompts

pytestmark = [pytest.mark.ray, pytest.mark.timeout(280)]

_SEEDS = itertools.count(100)


async def num_direct(fleet: Any) -> int:
    """Blocks that have reached the engine that continues streams without passing memory."""
    return int((await fleet.engines[1].status())["num_direct_blocks"])


async def until_joined(fleet: Any) -> None:
    """Until what a new prompt leaves behind comes from device to device."""
    before = await num_direct(fleet)
    for _ in range(300):
        (prompt,) = make_prompts((60,), seed=next(_SEEDS))
        await ask(fleet.front, prompt, max_tokens=2)
        if await num_direct(fleet) > before:
            return
        await asyncio.sleep(0.05)  # polling, bounded: links are made beside the requests
    raise AssertionError("no block came from device to device")


async def test_tokens_are_the_same_and_deaths_cost_a_way_through_memory(
    make_fleet: Callable[..., Any], sections: dict[str, Any]
) -> None:
    sections["kv"]["direct_gib"] = SHARE_BYTES / 2**30
    fleet = await make_fleet(0, way="split", roles=(Role.PREFILL, Role.DECODE), **sections)
    await until_joined(fleet)
    before = await num_direct(fleet)
    assert await ask_all(fleet.front, make_prompts()) == expected("llama")
    arrived = (await all_at_rest(fleet))[1]
    assert arrived["num_direct_blocks"] > before
    unfailed, _ = await through(fleet.front, mixed())

    for number in range(2):  # the stage that sends, then the one that receives
        (pids,) = [
            found for name, found in (await processes(fleet)).items()
            if name.startswith(f"replica-{number}.")
        ]  # fmt: skip
        kill = partial(os.kill, pids[1], signal.SIGKILL)
        assert await struck(fleet.front, [(40, kill)]) == unfailed
        await processes(fleet)
        if number == 0:
            await until_joined(fleet)  # with its successor
    await all_at_rest(fleet)
