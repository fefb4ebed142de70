"""Prompts and streams on engines of their own: no block is computed twice, and no token changes,
whoever dies."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.fleet.snapshot import Role
from actors.transport.shares import remove_unheld, shares_root
from app.engine_client.client import EngineUnavailable, GenerationRequest, TokenChunk
from app.fleet.client import FleetClient
from tests.app.fleet.live.conftest import SHARE_BYTES
from tests.app.fleet.live.test_failover import Answer, mixed, read, through
from tests.app.fleet.live.waiting import until
from tests.live.test_live_tier import at_rest as tier_at_rest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(280)]

SPLIT = (Role.PREFILL, Role.DECODE)


def largest_share(folder: Path) -> int:
    """Bytes of the files in the share that has most; unfinished ones included."""
    shares: dict[Path, int] = {}
    for path in folder.rglob("*"):
        if path.suffix in (".kv", ".part"):
            with suppress(FileNotFoundError):  # deleted meanwhile
                size = path.stat().st_blocks * 512
                shares[path.parent] = shares.get(path.parent, 0) + size
    return max(shares.values(), default=0)


def left_by_the_dead(folder: Path) -> int:
    """Bytes in shares once the next engine has started, which deletes those that nobody holds."""
    remove_unheld(shares_root(folder))
    return largest_share(folder)


async def all_at_rest(fleet: Any) -> list[dict[str, Any]]:
    """The engines' statistics once nothing is outstanding, moves of KV included."""
    found = [await tier_at_rest(engine) for engine in fleet.engines]
    assert all(status["num_free_blocks"] == status["num_blocks"] for status in found)
    return found


async def test_a_split_computes_no_block_twice(
    make_fleet: Callable[..., Any],
    sections: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That it changes no token: test_followed and test_ways_exact."""
    # What is not saved in time is computed: here there is time, however busy the machine is.
    monkeypatch.setattr("app.fleet.stream_placement._SAVED_WITHIN_S", 200.0)
    fleet = await make_fleet(0, way="split", roles=SPLIT, **sections)
    await through(fleet.front, mixed())
    moves = (await fleet.front.status())["fleet"]
    assert moves["num_hand_overs"] == sum(request.n for request in mixed())
    assert moves["num_moves"] == 0
    reader, decoder = await all_at_rest(fleet)
    prompts = {request.prompt for request in mixed()}
    num_blocks = len({p[: 4 * k + 4] for p in prompts for k in range(len(p) // 4)})
    assert reader["num_saved_blocks"] == num_blocks
    assert decoder["num_fetched_blocks"] == num_blocks
    assert decoder["num_early_blocks"] > 0, "some while their prompts were computed"
    assert 0 < largest_share(tmp_path) <= SHARE_BYTES
    for engine in fleet.engines:
        await engine.close()
    assert largest_share(tmp_path) == 0, "the store ends with its engines"


# ---- deaths -----------------------------------------------------------------------------------


async def processes(fleet: Any) -> dict[str, list[int]]:
    """Of each engine, by its id: its scheduler and its stage, once all engines serve."""
    for _ in range(6000):
        with suppress(EngineUnavailable):
            status = await fleet.front.status()
            engines, stages = status["engines"], status["stage_pids"]
            states = [engine.get("state") for engine in engines]
            if states == ["serving"] * len(fleet.engines) and len(stages) == len(engines):
                pids = {
                    e["id"]: [e["pid"], *ranks] for e, ranks in zip(engines, stages, strict=True)
                }
                if all(psutil.pid_exists(pid) for found in pids.values() for pid in found):
                    return pids
        await asyncio.sleep(0.02)  # polling, bounded
    raise AssertionError("the engines did not come back")


async def struck(
    front: FleetClient,
    strikes: Sequence[tuple[int, Callable[[], None]]],
    requests: Sequence[GenerationRequest] = (),
) -> list[Answer]:
    """The answers to these, or to `mixed`, while each strike falls after so many tokens."""
    num_tokens, to_come = 0, sorted(strikes, key=lambda strike: strike[0])

    def note(chunk: TokenChunk | None) -> None:
        nonlocal num_tokens
        num_tokens += 0 if chunk is None else len(chunk.tokens)
        while to_come and to_come[0][0] <= num_tokens:
            to_come.pop(0)[1]()

    tasks = [asyncio.create_task(read(front, r, note)) for r in requests or mixed()]
    await asyncio.sleep(0)  # all are submitted
    note(None)
    answers = await asyncio.gather(*tasks)
    assert not to_come
    return list(answers)


@pytest.mark.parametrize(
    "num_kills", [2, pytest.param(50, marks=[pytest.mark.long, pytest.mark.timeout(3000)])]
)
async def test_kills_at_any_moment_lose_and_double_nothing(
    make_fleet: Callable[..., Any], sections: dict[str, Any], tmp_path: Path, num_kills: int
) -> None:
    """Of the engine that reads prompts, while it writes too, and of those that continue them."""
    fleet = await make_fleet(0, way="split", roles=(*SPLIT, Role.DECODE), **sections)
    unfailed, _ = await through(fleet.front, mixed())
    num_tokens = 120 * len(unfailed)
    draw = random.Random(7)
    for _ in range(num_kills):
        pids = [pid for found in (await processes(fleet)).values() for pid in found]
        # Half of them while prompts are read and streams are handed over.
        after = draw.randrange(draw.choice([60, num_tokens]))
        kill = partial(os.kill, draw.choice(pids), signal.SIGKILL)
        answers = await struck(fleet.front, [(after, kill)])
        assert answers == unfailed
        assert fleet.front.num_open == 0
        assert largest_share(tmp_path) <= SHARE_BYTES
    await processes(fleet)
    await all_at_rest(fleet)
    for engine in fleet.engines:
        await engine.close()
    # Ray may take seconds to end the stages of a killed scheduler: until then they hold theirs.
    await until(lambda: not left_by_the_dead(tmp_path))
