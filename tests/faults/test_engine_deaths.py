"""Deaths that the shared server does not show, and a model that cannot be loaded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.scheduling.request import Grammar, SamplingParams
from app.engine_client import link
from app.engine_client.client import EngineUnavailable, GenerationRequest
from app.engine_client.link import EngineFailed
from app.engine_client.live import LiveEngine
from tests.faults import within
from tests.live.reference import ask, expected, make_prompts, settled

pytestmark = pytest.mark.ray
MAX_TOKENS = 150
LENGTHS = (3, 17, 40, 60, 5, 81, 22, 9)


async def streams_through(engine: LiveEngine, strike: Callable[[], None]) -> list[list[int]]:
    """Eight streams; `strike` falls when every one of them has had its first tokens."""
    started: set[int] = set()
    struck = False

    async def read(number: int, prompt: tuple[int, ...]) -> list[int]:
        nonlocal struck
        tokens: list[int] = []
        request = GenerationRequest(f"r{number}", prompt, SamplingParams(max_tokens=MAX_TOKENS))
        async for chunk in engine.generate(request):
            assert chunk.first == len(tokens), "a token was lost or doubled"
            tokens += chunk.tokens
            started.add(number)
            if len(started) == len(LENGTHS) and not struck:
                struck = True
                strike()
        return tokens

    answers = await asyncio.gather(*[read(n, p) for n, p in enumerate(make_prompts(LENGTHS))])
    assert struck
    return list(answers)


@pytest.mark.parametrize(
    "parallel", [{"pipeline_stages": 2, "transport": "call"}, {"tensor_ranks": 2}], ids=str
)
async def test_row_1_a_stage_is_killed_that_takes_plain_calls_or_a_rank_of_a_single_one(
    make_engine: Callable[..., LiveEngine],
    tiny_model: Callable[..., Path],
    parallel: dict[str, object],
) -> None:
    engine = make_engine(tiny_model("llama"), parallel=parallel)
    await engine.start()
    try:
        pids = await engine.stage_pids()
        answers = await streams_through(engine, lambda: os.kill(pids[-1][-1], signal.SIGKILL))
        assert answers == expected("llama", LENGTHS, MAX_TOKENS)
        status = await settled(engine)
        assert status["recoveries"] == 1
        assert status["num_free_blocks"] == status["num_blocks"]
    finally:
        await engine.close()


async def test_row_4_a_frozen_scheduler_is_replaced(
    make_engine: Callable[..., LiveEngine],
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It lives and its socket is open, but a question stays unanswered."""
    monkeypatch.setattr("app.engine_client.live._HEARTBEAT_S", 0.2)
    monkeypatch.setattr("app.engine_client.channel._ANSWER_WITHIN_S", 6.0)
    engine = make_engine(tiny_model("llama"))
    await engine.start()
    try:
        pid = (await engine.status())["pid"]
        answers = await streams_through(engine, lambda: os.kill(pid, signal.SIGSTOP))
        assert answers == expected("llama", LENGTHS, MAX_TOKENS)
        assert (await settled(engine))["pid"] != pid
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("struck", "blow"),
    [
        ("ray::StageActor.load", signal.SIGKILL),
        ("ray::SchedulerActor.start", signal.SIGSTOP),
        pytest.param("ray::SchedulerActor.start", signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("ray::StageActor.load", signal.SIGSTOP, marks=pytest.mark.long),  # 30 s
    ],
)
async def test_row_9_a_process_is_killed_or_stopped_at_the_first_start(
    make_engine: Callable[..., LiveEngine],
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    struck: str,
    blow: signal.Signals,
) -> None:
    """It is started again; an engine that is reported as ready is whole."""
    while True:  # a tiny model may load between two looks; the test's timeout bounds the tries
        others = _called("ray::")  # of servers that other tests share, and of earlier tries
        engine = make_engine(tiny_model("llama"), parallel={"pipeline_stages": 2})
        starting = asyncio.create_task(engine.start())
        while not (found := _called(struck) - others):
            if starting.done():
                break
            await asyncio.sleep(0)
        if found:
            break
        await starting
        await engine.close()
    try:
        os.kill(found.pop(), blow)
        if (struck, blow) == ("ray::SchedulerActor.start", signal.SIGSTOP):
            _give_it_up_soon(monkeypatch)
        assert not engine.is_ready()
        noticed_s = 40.0 if blow == signal.SIGSTOP else 0.0
        await asyncio.wait_for(starting, noticed_s + within.KILLED_WHILE_LOADING_S)
        prompts = make_prompts(LENGTHS)
        answers = await asyncio.gather(*[ask(engine, prompt, MAX_TOKENS) for prompt in prompts])
        assert answers == expected("llama", LENGTHS, MAX_TOKENS)
        for _ in range(2400):  # bounded: Ray takes seconds to end a process that is stopped
            if len(_called("ray::StageActor") - others) == 2:
                break
            await asyncio.sleep(0.05)
        assert len(_called("ray::StageActor") - others) == 2
    finally:
        await engine.close()


def _give_it_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler that is stopped now; the one that takes its place starts in its own time."""
    kill, patience_s = link.ray.kill, link._SILENT_S

    def killed(actor: Any, **more: Any) -> None:
        monkeypatch.setattr(link, "_SILENT_S", patience_s)
        kill(actor, **more)

    monkeypatch.setattr(link.ray, "kill", killed)
    monkeypatch.setattr(link, "_SILENT_S", 1.0)


def _called(title: str) -> set[int]:
    """Ids of processes that this one's have started, by the beginning of their title."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(title):
                found.add(process.pid)
    return found


async def test_row_11_a_model_that_cannot_load_is_named(
    make_engine: Callable[..., LiveEngine], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_model("llama").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    shard = broken / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:5000])
    with pytest.raises(EngineFailed, match=r"model\.safetensors"):
        await make_engine(broken).start()
    shard.unlink()
    with pytest.raises(EngineFailed, match="safetensors"):
        await make_engine(broken).start()


async def test_no_request_waits_without_end(
    make_engine: Callable[..., LiveEngine], tiny_model: Callable[..., Path]
) -> None:
    """Whatever it waits for: here for a stage that is not yet taken for dead."""
    engine = make_engine(
        tiny_model("llama"), engine={"step_deadline_s": 120.0, "request_deadline_s": 3.0}
    )
    await engine.start()
    ((stage,),) = await engine.stage_pids()
    try:
        os.kill(stage, signal.SIGSTOP)
        with pytest.raises(EngineUnavailable, match=r"not done within 3 s"):
            await ask(engine, make_prompts()[0], 9)
        os.kill(stage, signal.SIGCONT)
        status = await settled(engine)
        assert status["num_free_blocks"] == status["num_blocks"]
    finally:
        os.kill(stage, signal.SIGCONT)
        await engine.close()


@pytest.mark.long
async def test_row_3_a_stage_that_is_frozen_while_it_compiles_a_grammar(
    make_engine: Callable[..., LiveEngine],
    tiny_model: Callable[..., Path],
) -> None:
    """No step is in flight whose deadline could pass: the grammar's own limit is 30 s."""
    engine = make_engine(tiny_model("llama"), engine={"step_deadline_s": 3.0})
    await engine.start()
    prompt = make_prompts()[0]
    try:
        unfailed = await ask(engine, prompt, 9, grammar=Grammar("regex", "[ab]{20}"))
        ((stage,),) = await engine.stage_pids()
        os.kill(stage, signal.SIGSTOP)
        frozen = ask(engine, prompt, 9, grammar=Grammar("regex", "[ab]{20,21}"))
        assert await asyncio.wait_for(frozen, 90) == unfailed
        assert (await settled(engine))["recoveries"] == 1
    finally:
        await engine.close()
