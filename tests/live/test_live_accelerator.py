"""Activations that go from stage to stage beside Ray's channels: the same tokens, in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from actors.messages import StepError
from actors.pipeline import GraphPipeline
from actors.placement import create_stages
from actors.scheduling.build import build_core
from actors.scheduling.events import Emit, Event, Execute, StepDone, Submit
from actors.scheduling.plan import StepResult
from actors.scheduling.request import Request, SamplingParams
from app.settings import parse, resolve
from tests.live.accelerated_stage import AcceleratedStage
from tests.live.reference import MAX_TOKENS, expected, make_prompts

pytestmark = pytest.mark.ray


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stages", [2, 3])
async def test_tokens_over_the_accelerator_transport(
    ray_cluster: None,
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    stages: int,
    ranks: int,
) -> None:
    monkeypatch.setattr("actors.placement.StageActor", AcceleratedStage)
    config = resolve(
        parse(
            {
                "model": {"path": str(tiny_model("llama"))},
                "parallel": {"pipeline_stages": stages, "tensor_ranks": ranks},
                "scheduling": {"token_budget": 64, "max_requests": 32},
                "kv": {"block_size": 4},
            }
        )
    )
    actors = create_stages(config, None)
    flat = [actor for group in actors for actor in group]
    await asyncio.gather(*[actor.load.remote() for actor in flat])
    await asyncio.gather(*[actor.allocate.remote(512, 0) for actor in flat])
    prompts = make_prompts()
    core = build_core(replace(config.scheduler, num_blocks=512))
    answers: list[list[int]] = [[] for _ in prompts]
    finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    num_left = len(prompts)
    most_in_flight = 0

    def handle(event: Event) -> None:
        nonlocal num_left, most_in_flight
        for instruction in core.handle(event, time.monotonic()):
            if isinstance(instruction, Execute):
                pipeline.submit(instruction.plan)
            elif isinstance(instruction, Emit):
                for output in instruction.outputs:
                    answers[output.request_id] += output.tokens
                    num_left -= output.finish_reason is not None
        most_in_flight = max(most_in_flight, len(core.in_flight))
        if num_left == 0 and not core.in_flight and not finished.done():
            finished.set_result(None)

    def on_answer(answer: StepResult | StepError) -> None:
        if isinstance(answer, StepError):
            on_lost(answer.message)
        else:
            handle(StepDone(answer))

    def on_lost(reason: str) -> None:
        if not finished.done():
            finished.set_exception(RuntimeError(reason))

    pipeline = GraphPipeline(actors, config.scheduler.depth, accelerator="cpu")
    try:
        await pipeline.open(on_answer, on_lost)
        sampling = SamplingParams(max_tokens=MAX_TOKENS)
        for i, prompt in enumerate(prompts):
            handle(Submit(Request(i, prompt, sampling, time.monotonic())))
        await asyncio.wait_for(finished, 120)
        assert answers == expected("llama")
        assert most_in_flight == stages
        traffic = await asyncio.gather(*[actor.traffic.remote() for actor in flat])
        for number, (sent, received) in enumerate(traffic):
            assert (sent > 0) == (number < len(flat) - ranks), "every stage but the last sends"
            assert (received > 0) == (number >= ranks), "every stage but the first receives"
    finally:
        pipeline.close()
        for actor in flat:
            ray.kill(actor)
