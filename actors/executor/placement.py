"""Where actors live: one placement group per replica, bundle 0 for the replica and its scheduler,
one bundle per stage, so that a tensor-parallel group never leaves its node.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.engine.config import EngineConfig
from actors.stage.actor import StageActor
from actors.stage.memory import CGROUPS, OWN_CGROUPS, control_groups
from actors.stage.spec import MOST_THREADS, StageInfo, StageSpec
from actors.transport.pipeline import StageHandles
from actors.transport.running_time import running_timeout

logger = logging.getLogger("legato.stages")

REPLICA_CPUS = 0.5
_ANSWERS_WITHIN_S = 2.0
# Threads of each kind of call beside the loop of steps. `watch` never returns: a standby is watched
# twice, once before and once after it is taken, and must still tell its process id. `loads`: of
# adapters, one after the other; beside busy steps one takes seconds, and no grammar waits for it.
_CONCURRENCY_GROUPS = {"watch": 3, "compute": 1, "moves": 1, "loads": 1}


def bundles(
    num_stages: int, tensor_ranks: int, cpus_per_rank: float, gpus_per_rank: float
) -> list[dict[str, float]]:
    """Resource bundles of one replica: its own, then each stage (see `create_stages`)."""
    stage = {"CPU": cpus_per_rank * tensor_ranks}
    if gpus_per_rank:
        stage["GPU"] = gpus_per_rank * tensor_ranks
    return [{"CPU": REPLICA_CPUS}, *[dict(stage) for _ in range(num_stages)]]


def current_group() -> PlacementGroup | None:
    return ray.util.get_current_placement_group()


def _strategy(group: PlacementGroup | None, bundle: int) -> Any:
    if group is None:
        return "DEFAULT"
    return PlacementGroupSchedulingStrategy(
        placement_group=group,
        placement_group_bundle_index=bundle if group.bundle_count > bundle else -1,
    )


def scheduler_options(group: PlacementGroup | None) -> dict[str, Any]:
    """The scheduler shares the replica's bundle; it must be on the replica's node."""
    return {"num_cpus": 0, "scheduling_strategy": _strategy(group, 0)}


def threads_per_rank(config: EngineConfig) -> int:
    """Default number of compute threads of a rank: the node's usable cores divided by the ranks
    that compute at the same time."""
    if config.stage.num_threads:
        return config.stage.num_threads
    cores = len(psutil.Process().cpu_affinity() or []) or os.cpu_count() or 1
    cores = max(1, int(min(cores, cpu_quota() + 0.5)))
    ranks = config.stage.num_stages * config.stage.tensor_ranks
    return min(max(1, cores // ranks), MOST_THREADS)


def cpu_quota(root: Path = CGROUPS, own: Path = OWN_CGROUPS) -> float:
    """Cores that this process's control groups allow (a container's CPU limit); infinite without a
    limit. More threads would only wait for each other."""
    allowed = math.inf
    for group in control_groups("cpu", root, own):
        with suppress(OSError, ValueError):  # no such file, or "max"
            quota, period = (group / "cpu.max").read_text().split()
            allowed = min(allowed, int(quota) / int(period))
        with suppress(OSError, ValueError):  # version 1, where -1 is no limit
            if (quota_us := int((group / "cpu.cfs_quota_us").read_text())) > 0:
                period_us = int((group / "cpu.cfs_period_us").read_text())
                allowed = min(allowed, quota_us / period_us)
    return allowed


@functools.cache
def _remote(actor_class: type) -> Any:
    """Once for all rebuilds: Ray keeps each class that it is given for good, in every process."""
    return ray.remote(concurrency_groups=_CONCURRENCY_GROUPS)(actor_class)


def create_stages(
    config: EngineConfig, group: PlacementGroup | None, *, standby: str | None = None
) -> StageHandles:
    """Stage actors [stage][rank], created but not loaded. standby: name of a set beside the running
    one, which holds the bundles' CPUs.
    """
    actor_class = _remote(StageActor)
    threads = threads_per_rank(config)
    stages = []
    for stage in range(config.stage.num_stages):
        ranks = []
        for rank in range(config.stage.tensor_ranks):
            spec: StageSpec = replace(config.stage, stage=stage, rank=rank, num_threads=threads)
            options = actor_class.options(
                num_cpus=config.cpus_per_rank if group is not None and standby is None else 0,
                name=None if standby is None else _name(standby, stage, rank),
                num_gpus=config.gpus_per_rank,
                scheduling_strategy=_strategy(group, stage + 1),
                # One thread for calls that change state: with more, Ray may reorder an actor's
                # calls, and a step that runs before its predecessor reads stale state.
                max_concurrency=1,
                **_environment(config),
            )
            ranks.append(options.remote(spec, config.channel_bytes))
        stages.append(ranks)
    return stages


def _name(standby: str, stage: int, rank: int) -> str:
    return f"{standby}-{stage}-{rank}"


def find_stages(config: EngineConfig, standby: str) -> StageHandles:
    """The actors of `create_stages`, from another process. Raises ValueError without them."""
    stages, ranks = range(config.stage.num_stages), range(config.stage.tensor_ranks)
    return [[ray.get_actor(_name(standby, stage, rank)) for rank in ranks] for stage in stages]


async def unused(stages: StageHandles) -> StageHandles:
    """These actors if all of them answer at once and none has begun to load; otherwise none, and
    they are killed.
    """
    try:
        async with asyncio.timeout(_ANSWERS_WITHIN_S):  # `wait_for` may lose a cancellation
            calls = [actor.is_unused.remote() for ranks in stages for actor in ranks]
            if all(await asyncio.gather(*calls)):
                return stages
        logger.error("the standby stages are in use")
    except (ray.exceptions.RayError, TimeoutError) as error:
        logger.error("the standby stages are lost too: %s", type(error).__name__)
    kill_stages(stages)
    return []


def kill_stages(stages: Sequence[Sequence[Any]]) -> None:
    for ranks in stages:
        for actor in ranks:
            ray.kill(actor)


def _environment(config: EngineConfig) -> dict[str, Any]:
    """Set only if needed, because a process with its own environment starts more slowly."""
    if not config.stage.symmetric_memory:
        return {}
    # Symmetric memory needs every rank to see all GPUs of the stage under different numbers;
    # Ray makes only one GPU visible per rank, always as number 0.
    return {"runtime_env": {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}}


async def leave_loads(flat: Sequence[Any]) -> None:
    """Have ranks leave the adapter that they are loading, as it takes too long: the next one then
    begins at once."""
    with suppress(ray.exceptions.RayError, TimeoutError):
        async with running_timeout(_ANSWERS_WITHIN_S):
            await asyncio.gather(*[actor.leave_load.remote() for actor in flat])


def first_line(error: ray.exceptions.RayError) -> str:
    """Clients get it: the rest of what Ray says is about its actors and their hosts."""
    return str(getattr(error, "cause", None) or error).partition("\n")[0]


def cause_in_words(error: Exception) -> str:
    """Of stages that do not start. A ValueError is written for whoever runs the server, and begins
    with the setting or file at fault; others say little without their type."""
    cause = getattr(error, "cause", None) or error
    return str(cause) if isinstance(cause, ValueError) else f"{type(cause).__name__}: {cause}"


async def load_stages(stages: Sequence[Sequence[Any]]) -> list[StageInfo]:
    """Load every rank of every stage; their reports, stage after stage."""
    addresses = await asyncio.gather(*[_meeting_place(ranks) for ranks in stages])
    infos: list[StageInfo] = await asyncio.gather(
        *[
            actor.load.remote(address)
            for ranks, address in zip(stages, addresses, strict=True)
            for actor in ranks
        ]
    )
    return infos


async def _meeting_place(ranks: Sequence[Any]) -> str | None:
    """Rendezvous address of a stage's ranks: a free port on the node of rank 0."""
    if len(ranks) == 1:
        return None
    nodes = await asyncio.gather(*[actor.node_id.remote() for actor in ranks])
    address: str = await ranks[0].free_address.remote(len(set(nodes)) == 1)
    return address


async def processes_here(flat: Sequence[Any], pids: Sequence[int]) -> list[psutil.Process]:
    """Of these actors' processes, those on this node."""
    nodes = await asyncio.gather(*[actor.node_id.remote() for actor in flat])
    here, found = ray.get_runtime_context().get_node_id(), []
    for pid, node in zip(pids, nodes, strict=True):
        if node == here:
            with suppress(psutil.Error):  # it has died: the pipeline reports it
                found.append(psutil.Process(pid))
    return found
