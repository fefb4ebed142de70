"""What a single machine does not do by itself: activations beside Ray's channels, as between GPUs,
and rings by TCP, as between nodes. The same tokens, in order."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.dag import DAGContext
from ray.util.placement_group import PlacementGroup

from actors.executor.placement import create_stages, load_stages
from actors.scheduling.build import build_core
from actors.transport.graph_pipeline import GraphPipeline, set_channel_bytes
from app.settings.load import parse, resolve
from tests.live.accelerated_stage import SECONDS, AcceleratedStage
from tests.live.pipeline_answers import StageTimes, answered
from tests.live.reference import MAX_TOKENS, expected, make_prompts

pytestmark = pytest.mark.ray


@asynccontextmanager
async def opened(
    model: Path,
    stages: int,
    ranks: int,
    accelerator: str | None = None,
    group: PlacementGroup | None = None,
    stage_times_s: list[StageTimes] | None = None,
) -> AsyncGenerator[list[Any]]:
    """Stage actors whose pipeline has answered forty prompts, exactly and with all stages busy."""
    config = resolve(
        parse(
            {
                "model": {"path": str(model)},
                "parallel": {"pipeline_stages": stages, "tensor_ranks": ranks},
                "scheduling": {"token_budget": 64, "max_requests": 32},
                "kv": {"block_size": 4},
            }
        )
    )
    actors = create_stages(config, group)
    flat = [actor for group in actors for actor in group]
    set_channel_bytes(config.channel_bytes)
    pipeline = GraphPipeline(actors, config.scheduler.depth, accelerator)
    try:
        await load_stages(actors)
        await asyncio.gather(*[actor.allocate.remote(512, 0) for actor in flat])
        core = build_core(replace(config.scheduler, num_blocks=512))
        times = [] if stage_times_s is None else stage_times_s
        answers, most_in_flight = await asyncio.wait_for(
            answered(core, pipeline, make_prompts(), MAX_TOKENS, times), 120
        )
        assert answers == expected("llama")
        assert most_in_flight == config.scheduler.depth
        # A channel that is made smaller grows, and leaks what it was.
        told = await asyncio.gather(*[actor.__ray_call__.remote(channel_bytes) for actor in flat])
        assert {*told, channel_bytes(None)} == {config.channel_bytes}
        yield flat
    finally:
        pipeline.close()
        for actor in flat:
            ray.kill(actor)


def channel_bytes(_: Any) -> int:
    return DAGContext.get_current().buffer_size_bytes


@pytest.mark.parametrize(
    ("stages", "ranks"),
    [(2, 1), *(pytest.param(*n, marks=pytest.mark.long) for n in ((2, 2), (3, 1), (3, 2)))],
)
async def test_activations_over_the_accelerator_transport(
    ray_cluster: None,
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    stages: int,
    ranks: int,
) -> None:
    monkeypatch.setattr("actors.executor.placement.StageActor", AcceleratedStage)
    times: list[StageTimes] = []
    async with opened(tiny_model("llama"), stages, ranks, "cpu", stage_times_s=times) as actors:
        traffic = await asyncio.gather(*[actor.traffic.remote() for actor in actors])
        for number, (sent, received) in enumerate(traffic):
            assert (sent > 0) == (number < len(actors) - ranks), "all stages but the last send"
            assert (received > 0) == (number >= ranks), "all stages but the first receive"
    assert {len(step) for step in times} == {stages}
    for stage in range(stages):
        by_device = [
            end - begin == pytest.approx(SECONDS) for begin, end in (s[stage] for s in times)
        ]
        # An earlier stage's time may come after the answer, on a machine where nothing computes
        # long; the last stage's is in it.
        least = 0.5 if stage < stages - 1 else 1.0
        assert sum(by_device) >= least * len(times), "times are the device's, not the launches'"


@pytest.mark.parametrize(
    ("stages", "ranks"),
    [(2, 1), *(pytest.param(*n, marks=pytest.mark.long) for n in ((1, 1), (2, 2)))],
)
async def test_rings_by_tcp_as_between_nodes(
    ray_cluster: None,
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    stages: int,
    ranks: int,
) -> None:
    async def several(self: GraphPipeline) -> bool:
        return False

    monkeypatch.setattr(GraphPipeline, "_on_one_node", several)
    async with opened(tiny_model("llama"), stages, ranks):
        pass


@pytest.mark.long
@pytest.mark.timeout(240)
def test_stages_on_several_nodes(tiny_model: Callable[..., Path]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.live.several_nodes", str(tiny_model("llama"))],
        cwd=Path(__file__).resolve().parents[2],
        env={key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert "exact" in done.stdout, done.stderr[-3000:]
