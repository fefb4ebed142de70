"""What stage actors on GPUs need of Ray before they compute: told without a GPU, for Ray hands out
numbers of GPUs that a node only claims to have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.experimental.channel import ChannelContext
from ray.experimental.channel.torch_tensor_accelerator_channel import (
    _do_check_has_accelerators,
    _do_get_unique_communication_id,
)

from actors.executor.placement import create_stages, load_stages
from app.settings.load import parse, resolve

pytestmark = pytest.mark.ray


@asynccontextmanager
async def actors_on(
    device: str, folder: Path, *, sees_all: bool = False, **parallel: Any
) -> AsyncGenerator[list[list[Any]]]:
    """sees_all: every rank sees all GPUs, as ranks do that share memory."""
    settings = {"model": {"path": str(folder)}, "parallel": {**parallel, "device": device}}
    config = resolve(parse(settings))
    if sees_all:
        config = replace(config, stage=replace(config.stage, symmetric_memory=True))
    stages = create_stages(config, None)
    try:
        yield stages
    finally:
        for actor in [actor for ranks in stages for actor in ranks]:
            ray.kill(actor)


async def asked(stages: list[list[Any]], question: Callable[[Any], Any]) -> list[Any]:
    calls = [actor.__ray_call__.remote(question) for ranks in stages for actor in ranks]
    return await asyncio.wait_for(asyncio.gather(*calls), 60)


def devices(stage: Any) -> tuple[str, str]:
    return stage._spec.device, str(ChannelContext.get_current().torch_device)


async def test_a_graph_between_gpus_gets_its_id_without_cupy(
    ray_cluster: None, tiny_model: Callable[..., Path]
) -> None:
    async with actors_on("cuda", tiny_model("llama"), pipeline_stages=2) as stages:
        assert all(await asked(stages, _do_get_unique_communication_id))
        assert all(await asked(stages, _do_check_has_accelerators))
        assert await asked(stages, devices) == [("cuda:0", "cuda:0")] * 2


@pytest.mark.long
async def test_ranks_that_share_memory_see_all_gpus_under_numbers_that_differ(
    ray_cluster: None, tiny_model: Callable[..., Path]
) -> None:
    async with actors_on(
        "cuda", tiny_model("llama"), tensor_ranks=2, symmetric_memory=True
    ) as stages:
        found = await asked(stages, devices)
        assert sorted(found) == [("cuda:0", "cuda:0"), ("cuda:1", "cuda:1")]


async def test_a_graph_enters_the_device_of_a_lone_rank(
    ray_cluster: None, tiny_model: Callable[..., Path]
) -> None:
    """Also where Ray has been told not to set CUDA_VISIBLE_DEVICES."""
    async with actors_on("cuda", tiny_model("llama"), sees_all=True) as stages:
        [given] = await asked(stages, lambda stage: ray.get_runtime_context().get_accelerator_ids())
        device = f"cuda:{given['GPU'][0]}"  # the first may still be of the actors before
        assert await asked(stages, devices) == [(device, device)]


async def test_ranks_meet_at_a_port_of_their_own_node(
    ray_cluster: None, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler's node may be another one: it is not asked for a port."""

    def elsewhere(host: str) -> str:
        raise AssertionError("asked on the scheduler's node")

    monkeypatch.setattr("actors.executor.placement.free_address", elsewhere, raising=False)
    async with actors_on("cpu", tiny_model("llama"), tensor_ranks=2) as stages:
        infos = await asyncio.wait_for(load_stages(stages), 120)
        assert len(infos) == 2
