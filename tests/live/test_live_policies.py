"""Every policy, switched live on one engine: the same tokens; and its recorded life replays."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.engine.event_recorder import read_events
from actors.scheduling.event_log import check_replay
from actors.scheduling.policies import POLICIES
from app.bench.load.workload import Load
from app.bench.studies.policies import policy_results, run_policies
from app.engine_client.channel import QuestionFailed
from app.engine_client.client import RequestRefused
from app.engine_client.live import LiveEngine
from tests.live.reference import ask_all, expected, make_prompts, settled

pytestmark = pytest.mark.ray


async def test_policies_give_equal_tokens_and_the_log_replays(
    make_engine: Callable[..., LiveEngine], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    engine = make_engine(
        tiny_model("llama"),
        scheduling={"token_budget": 64, "max_requests": 32},
        telemetry={"directory": str(tmp_path), "events": True},
    )
    await engine.start()
    try:
        for policy in POLICIES:
            await engine.reconfigure({"policy": policy})
            assert await ask_all(engine, make_prompts()) == expected("llama"), policy
            status = await settled(engine)
            assert status["policy"] == policy
            assert status["num_free_blocks"] == status["num_blocks"], policy
        with pytest.raises(RequestRefused, match="no_such_policy"):
            await engine.reconfigure({"policy": "no_such_policy"})
        with pytest.raises(RequestRefused, match="the stages were built for 32") as caught:
            await engine.reconfigure({"scheduling.max_requests": 33})
        assert caught.value.param == "scheduling.max_requests"
        with pytest.raises(RequestRefused, match="tbt_ms: must be a number or null"):
            await engine.reconfigure({"tbt_ms": "soon"})
        with pytest.raises(QuestionFailed, match="TypeError"):
            await engine._link.ask("reconfigure", {"policy": "sarathi"}, "one too many")
        assert await ask_all(engine, make_prompts()[:2]) == expected("llama")[:2]
    finally:
        await engine.close()
    (file,) = list(tmp_path.glob("events-*.parquet"))  # noqa: ASYNC240 (a local folder)
    assert check_replay(read_events(file)) > 400


async def test_switching_under_load_loses_nothing(
    make_engine: Callable[..., LiveEngine], tiny_model: Callable[..., Path]
) -> None:
    engine = make_engine(tiny_model("llama"), parallel={"pipeline_stages": 2})
    await engine.start()
    try:
        work = asyncio.create_task(ask_all(engine, make_prompts()))
        for policy in ("vllm", "fair", "orca", "mlfq", "sarathi"):
            await engine.reconfigure({"policy": policy, "token_budget": 32})
        assert await work == expected("llama")
    finally:
        await engine.close()


async def test_the_comparison_of_policies_has_figures_for_each(
    make_engine: Callable[..., LiveEngine], tiny_model: Callable[..., Path]
) -> None:
    """`legato bench policies` in small: the same jobs for all, nothing fails, every cell filled."""
    load = Load(lengths="12x40", qps=100.0, seconds=0.05, num_long=1, long_tokens=150)
    assert load.jobs() == load.jobs()
    assert sorted(job.num_prompt_tokens for job in load.jobs())[-1] == 150
    engine = make_engine(tiny_model("llama"))
    await engine.start()
    try:
        figures = await run_policies(engine, ["sarathi", "orca"], load)
        assert (await settled(engine))["policy"] == "orca"
    finally:
        await engine.close()
    assert list(figures) == ["sarathi", "orca"]
    assert all(f.num_failed == 0 and f.num_requests == 6 for f in figures.values())
    found = policy_results(load, figures)
    assert found["load"]["output_tokens"] == 5 * 40 + 8
    cells = [figure for entry in found["policies"].values() for figure in entry.values()]
    assert not any(isinstance(figure, float) and math.isnan(figure) for figure in cells)
