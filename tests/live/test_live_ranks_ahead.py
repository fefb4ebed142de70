"""Stage actors of one stage, whose ranks launch captured steps ahead: plans come by mailboxes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

pytest.importorskip("triton", reason="Triton is not installed: the GPU backends need it")

from actors.executor.placement import create_stages, load_stages
from actors.scheduling.build import build_core
from actors.stage.actor import StageActor
from actors.transport.graph_pipeline import GraphPipeline, set_channel_bytes
from app.settings.load import parse, resolve
from tests.actors.stage.greedy_reference import expected, make_prompts
from tests.live.pipeline_answers import answered

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="interpreted kernels; see test_gpu_stage"
    ),
]
LENGTHS, TOKENS = (1, 3, 13), 6


class CapturedStage(StageActor):
    """Captures its steps without a GPU, and counts those that it launches ahead."""

    def __init__(self, spec: Any, channel_bytes: int | None = None) -> None:
        super().__init__(replace(spec, backend="triton", graph_tokens=8), channel_bytes)
        self._num_ahead = 0

    def allocate(self, num_blocks: int, num_host_blocks: int, num_requests: int = 0) -> None:
        from tests import swift_interpreter
        from tests.gpu.captures import EagerCapture

        swift_interpreter.install()
        super().allocate(num_blocks, num_host_blocks, num_requests)
        runner: Any = self._running()
        runner.capture(EagerCapture())
        launch = runner._ahead._launch

        def counted(*arguments: Any) -> None:
            launch(*arguments)
            self._num_ahead += runner._ahead._launched is not None

        runner._ahead._launch = counted

    def num_ahead(self) -> int:
        return self._num_ahead


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
async def test_plans_are_launched_ahead_by_every_rank(
    ray_cluster: None,
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
) -> None:
    monkeypatch.setattr("actors.executor.placement.StageActor", CapturedStage)
    settings = {
        "model": {"path": str(tiny_model("llama")), "max_model_len": 64},
        "parallel": {"tensor_ranks": ranks},
        "scheduling": {"token_budget": 8, "max_requests": 4},
        "kv": {"block_size": 4},
    }
    config = resolve(parse(settings))
    stages = create_stages(config, None)
    set_channel_bytes(config.channel_bytes)
    pipeline = GraphPipeline(stages, config.scheduler.depth)
    try:
        await load_stages(stages)
        await asyncio.gather(*[actor.allocate.remote(64, 0) for actor in stages[0]])
        core = build_core(replace(config.scheduler, num_blocks=64, prefix_cache=False))
        answers, _ = await asyncio.wait_for(
            answered(core, pipeline, make_prompts(LENGTHS), TOKENS, []), 120
        )
        counts = await asyncio.gather(*[actor.num_ahead.remote() for actor in stages[0]])
    finally:
        pipeline.close()
        for actor in stages[0]:
            ray.kill(actor)
    assert answers == [answer[:TOKENS] for answer in expected("llama", LENGTHS)]
    assert len(counts) == ranks
    assert min(counts) > 0
