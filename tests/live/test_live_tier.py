"""Tokens are the same with a second tier of the prefix cache and without, restarts included."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.engine_client.live import LiveEngine
from tests.live.reference import LENGTHS, ask, ask_all, expected, make_prompts, settled

pytestmark = pytest.mark.ray

# So slow a model that fetching always beats computing: what is asked is not how fast either is.
SLOW = "{name: slow, tokens_s: [[1, 1.0], [64, 64.0]]}"
_BLOCK = 3 * 2 * 2 * 16 * 4 * 4  # bytes of 4 tokens of the tiny model, all layers


def slow_model(folder: Path) -> str:
    path = folder / "slow.yaml"
    path.write_text(SLOW)
    return str(path)


def fewest_files(folder: Path) -> int:
    """Blocks on disk of the rank that has fewest."""
    places = [lock.parent for lock in folder.rglob("lock")]
    return min([len(list(place.glob("*.kv"))) for place in places], default=0)


async def at_rest(engine: LiveEngine) -> dict[str, Any]:
    """The engine's statistics once nothing is outstanding, moves of KV included."""
    for _ in range(600):
        status = await settled(engine)
        if not status["num_moves"]:
            return status
        await asyncio.sleep(0.05)  # polling for an end, bounded
    raise AssertionError(f"the moves never ended: {status}")


async def until_kept(engine: LiveEngine, folder: Path, num_blocks: int) -> None:
    """Until so many blocks are told and on disk, of every rank."""
    for _ in range(600):
        status = await at_rest(engine)
        if status["num_tier_blocks"] >= num_blocks and fewest_files(folder) >= num_blocks:
            return
        await asyncio.sleep(0.05)  # polling for an end, bounded
    raise AssertionError(f"{fewest_files(folder)} of {num_blocks} files: {status}")


def damage(folder: Path) -> None:
    """A third of the files is changed or cut."""
    for number, path in enumerate(sorted(folder.rglob("*.kv"))):
        content = bytearray(path.read_bytes())
        if number % 6 == 0:
            content[-5] ^= 4
        elif number % 6 == 1:
            del content[-9:]
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("stages", "ranks"),
    [(1, 1), *(pytest.param(*n, marks=pytest.mark.long) for n in ((2, 1), (1, 2)))],
)
async def test_prompts_come_back_after_a_restart(
    make_engine: Callable[..., LiveEngine],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    stages: int,
    ranks: int,
) -> None:
    sections: dict[str, Any] = {
        "parallel": {"pipeline_stages": stages, "tensor_ranks": ranks},
        # Too small for all prompts: what the device has forgotten comes back from host or disk.
        "kv": {
            "memory_gib": 300 * _BLOCK / stages / ranks / 2**30,
            "host_cache_gib": 100 * _BLOCK / stages / ranks / 2**30,
            "disk_cache_gib": 0.1,
            "disk_cache_path": str(tmp_path),
        },
        "scheduling": {"token_budget": 64, "cost_model": slow_model(tmp_path)},
    }
    num_blocks = len({tuple(p[: 4 * k + 4]) for p in make_prompts() for k in range(len(p) // 4)})
    for life in range(3):
        engine = make_engine(tiny_model("llama"), **sections)
        await engine.start()
        try:
            if life == 0:
                for prompt, answer in zip(make_prompts(), expected("llama"), strict=True):
                    assert await ask(engine, prompt) == answer
                    await at_rest(engine)  # all of it is saved before the device forgets it
                await until_kept(engine, tmp_path, num_blocks)
            for _ in range(2):
                assert await ask_all(engine, make_prompts()) == expected("llama")
            status = await at_rest(engine)
            assert status["num_free_blocks"] == status["num_blocks"], "KV blocks leaked"
            assert status["num_fetched_blocks"] > (0 if life == 2 else 100)
        finally:
            await engine.close()
        if life == 1:
            damage(tmp_path)


@pytest.mark.long
async def test_int8_and_a_stage_that_dies(
    make_engine: Callable[..., LiveEngine], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """A stage's death ends what was under way; its successor finds what is on disk."""
    kv = {"dtype": "int8", "disk_cache_gib": 0.1, "disk_cache_path": str(tmp_path)}
    prompts = make_prompts(LENGTHS[:20])
    plain = make_engine(tiny_model("llama"), kv={"dtype": "int8"})
    await plain.start()
    try:
        right = await ask_all(plain, prompts)
    finally:
        await plain.close()
    scheduling = {"cost_model": slow_model(tmp_path)}
    engine = make_engine(tiny_model("llama"), kv=kv, scheduling=scheduling)
    await engine.start()
    try:
        assert await ask_all(engine, prompts) == right
        await until_kept(engine, tmp_path, sum(len(p) // 4 for p in prompts))
        ((pid,),) = await engine.stage_pids()
        os.kill(pid, signal.SIGKILL)
        assert await ask_all(engine, prompts) == right
        status = await at_rest(engine)
        assert status["recoveries"] == 1
        assert status["num_fetched_blocks"] > 100
        again = await ask(engine, prompts[-1])
        assert again == right[-1]
    finally:
        await engine.close()
