"""Requests that raise, break or kill the stages of a live engine: the others' tokens stay exact."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from actors.transport.messages import Readiness
from app.engine_client.client import EngineUnavailable, GenerationFailed
from app.engine_client.live import LiveEngine
from tests.faults import within
from tests.faults.faulty_stage import BREAK, KILL, RAISE, FaultyScheduler
from tests.live.reference import ask, expected, make_prompts, settled

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
LENGTHS = (3, 17, 40, 60, 5, 81)
MAX_TOKENS = 60


async def test_rows_2_and_10_nothing_is_lost_but_the_culprits(
    make_engine: Callable[..., LiveEngine],
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.engine_client.link.SchedulerActor", FaultyScheduler)
    monkeypatch.setattr("app.engine_client.live._READY_WITHIN_S", within.REBUILT_S)
    engine = make_engine(tiny_model("llama"))
    await engine.start()
    prompts, stages_lost = make_prompts(LENGTHS), asyncio.Event()
    handle = engine.on_message

    def listen(message: object) -> None:
        handle(message)  # type: ignore[arg-type]
        if message == Readiness(is_ready=False):
            stages_lost.set()

    monkeypatch.setattr(engine, "on_message", listen)

    async def beside(culprit: tuple[int, ...]) -> object:
        """How a culprit's request ends; the others' answers are those of an unfailed run."""
        asked = [(culprit, 8), *((prompt, MAX_TOKENS) for prompt in prompts)]
        if culprit is RAISE:  # alone for four steps, it would have the stages taken to be at fault
            asked.append(asked.pop(0))
        ends = {prompt: asyncio.create_task(ask(engine, prompt, num)) for prompt, num in asked}
        culprit_ends = ends.pop(culprit)
        answers = await asyncio.gather(*ends.values())
        assert answers == expected("llama", LENGTHS, MAX_TOKENS)
        (end,) = await asyncio.gather(culprit_ends, return_exceptions=True)
        return end

    async def refused_while_rebuilding() -> None:
        """No request is kept waiting for long, and readiness says why."""
        await stages_lost.wait()
        assert not engine.is_ready()
        with monkeypatch.context() as patch:
            patch.setattr("app.engine_client.live._READY_WITHIN_S", 0.0)
            with pytest.raises(EngineUnavailable):
                await ask(engine, prompts[0], 1)

    try:
        assert isinstance(await beside(RAISE), GenerationFailed)
        assert (await settled(engine))["recoveries"] == 0
        # Each step fails from some time on, and the first rebuild meets a full disk.
        broken = await beside(BREAK)
        assert isinstance(broken, (list, GenerationFailed))
        after = (await settled(engine))["recoveries"]
        assert after >= 1
        stages_lost.clear()
        watching = asyncio.create_task(refused_while_rebuilding())
        assert isinstance(await beside(KILL), GenerationFailed)
        await watching
        assert (await settled(engine))["recoveries"] <= after + 3

        await engine.reconfigure({"policy": "orca"})
        pid = (await engine.status())["pid"]
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(psutil.Process(pid).wait, 30)
        answers = await asyncio.gather(*[ask(engine, p, MAX_TOKENS) for p in prompts])
        assert list(answers) == expected("llama", LENGTHS, MAX_TOKENS)
        status = await settled(engine)
        assert (status["policy"], status["pid"] != pid) == ("orca", True)
        assert status["num_free_blocks"] == status["num_blocks"]
    finally:
        await engine.close()
