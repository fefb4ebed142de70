"""Where an engine's processes live, and what they find there: cores, limits, meeting places."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

import actors.executor.placement as module
from actors.engine.config import EngineConfig
from actors.executor.placement import (
    REPLICA_CPUS,
    bundles,
    cpu_quota,
    create_stages,
    find_stages,
    load_stages,
    threads_per_rank,
    unused,
)
from actors.scheduling.config import SchedulerConfig
from actors.stage.spec import MOST_THREADS, StageSpec
from tests.actors.executor.paper_ranks import ENDLESS, Cluster, flat, in_place_of_ray, info


def settings(num_stages: int, tensor_ranks: int, **changes: Any) -> EngineConfig:
    spec = StageSpec("none", num_stages=num_stages, tensor_ranks=tensor_ranks)
    return replace(EngineConfig(spec, SchedulerConfig(num_blocks=8)), **changes)


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/", {}, math.inf),
        ("0::/", {"cpu.max": "250000 100000"}, 2.5),
        ("0::/", {"cpu.max": "max 100000"}, math.inf),
        ("0::/a/b", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "400000 100000"}, 1.5),
        ("0::/host/only", {"cpu.max": "50000 100000"}, 0.5),  # which a container does not see
        (
            "1:cpu,cpuacct:/job/step",
            {
                "cpu/job/cpu.cfs_quota_us": "300000",
                "cpu/job/cpu.cfs_period_us": "100000",
                "cpu/job/step/cpu.cfs_quota_us": "-1",
                "cpu/job/step/cpu.cfs_period_us": "100000",
                "cpu/other/cpu.cfs_quota_us": "100000",
                "cpu/other/cpu.cfs_period_us": "100000",
            },
            3.0,
        ),
        (  # version 2 beside version 1
            "4:memory:/job\n2:cpu:/job\n0::/job",
            {
                "cpu/job/cpu.cfs_quota_us": "200000",
                "cpu/job/cpu.cfs_period_us": "100000",
                "unified/job/cpu.max": "max 100000",
            },
            2.0,
        ),
    ],
)
def test_the_least_quota_of_the_groups_above_counts(
    tmp_path: Path, own: str, files: dict[str, str], cores: float
) -> None:
    (tmp_path / "own").write_text(own + "\n")
    for name, content in files.items():
        (file := tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content + "\n")
    assert cpu_quota(tmp_path / "groups", tmp_path / "own") == cores


def test_a_stage_never_leaves_its_node() -> None:
    """One bundle holds all of its ranks, and the first one the replica with its scheduler."""
    found = bundles(num_stages=2, tensor_ranks=4, cpus_per_rank=0.5, gpus_per_rank=1.0)
    assert found == [{"CPU": REPLICA_CPUS}, {"CPU": 2.0, "GPU": 4.0}, {"CPU": 2.0, "GPU": 4.0}]
    assert bundles(1, 2, 0.5, 0.0) == [{"CPU": REPLICA_CPUS}, {"CPU": 1.0}]


@pytest.mark.parametrize(
    ("quota", "num_stages", "tensor_ranks", "threads"),
    [
        (math.inf, 1, 1, 12),
        (math.inf, 2, 2, 3),
        (math.inf, 5, 1, 2),
        (math.inf, 16, 1, 1),  # more ranks than cores
        (3.5, 1, 1, 4),
        (3.4, 1, 1, 3),
        (0.1, 1, 1, 1),
    ],
)
def test_ranks_share_the_cores_that_the_container_has(
    monkeypatch: pytest.MonkeyPatch, quota: float, num_stages: int, tensor_ranks: int, threads: int
) -> None:
    monkeypatch.setattr(module, "cpu_quota", lambda: quota)
    monkeypatch.setattr("psutil.Process.cpu_affinity", lambda process: list(range(12)))
    assert threads_per_rank(settings(num_stages, tensor_ranks)) == threads


def test_more_cores_than_a_pool_holds_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cpu_quota", lambda: math.inf)
    monkeypatch.setattr("psutil.Process.cpu_affinity", lambda process: list(range(384)))
    assert threads_per_rank(settings(1, 1)) == MOST_THREADS
    pool = (Path(module.__file__).parents[2] / "kernels/cpu/src/pool.h").read_text()
    assert f"kMaxThreads = {MOST_THREADS};" in pool


def test_threads_that_are_set_are_not_counted() -> None:
    chosen = replace(StageSpec("none"), num_threads=7)
    assert threads_per_rank(settings(1, 1, stage=chosen)) == 7
    assert 1 <= threads_per_rank(settings(1, 1)) <= (os.cpu_count() or 1)


class ActorClass:
    """`ray.remote(StageActor)`, which notes each actor's options and spec."""

    def __init__(self) -> None:
        self.made: list[tuple[dict[str, Any], StageSpec]] = []
        self._options: dict[str, Any] = {}
        self.num_classes = 0

    def options(self, **options: Any) -> ActorClass:
        self._options = options
        return self

    def remote(self, spec: StageSpec, channel_bytes: int) -> tuple[int, int]:
        self.made.append((self._options, spec))
        return spec.stage, spec.rank


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> Iterator[ActorClass]:
    made = ActorClass()
    module._remote.cache_clear()

    def remote(**options: Any) -> Any:
        made.num_classes += 1
        return lambda actor_class: made

    monkeypatch.setattr(ray, "remote", remote)
    yield made
    module._remote.cache_clear()


def test_rebuilds_give_ray_no_other_class(actors: ActorClass) -> None:
    """Each would stay in the memory of every process for good."""
    for _ in range(3):
        create_stages(settings(1, 1), None)
    assert (actors.num_classes, len(actors.made)) == (1, 3)


def test_every_rank_knows_its_place(actors: ActorClass) -> None:
    config = settings(2, 2, cpus_per_rank=0.25)
    assert create_stages(config, None) == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
    assert [(spec.stage, spec.rank) for _, spec in actors.made] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for options, spec in actors.made:
        assert spec.num_threads == threads_per_rank(config)
        assert options["max_concurrency"] == 1  # or Ray may reorder its steps
        assert (options["name"], options["num_cpus"]) == (None, 0)
        assert "runtime_env" not in options


def test_a_standby_takes_no_share_of_the_bundles_and_is_found_by_name(
    actors: ActorClass, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Group:
        bundle_count = 2

    monkeypatch.setattr(module, "_strategy", lambda group, bundle: bundle)
    config = settings(2, 1, cpus_per_rank=0.25)
    create_stages(config, Group(), standby="s")  # type: ignore[arg-type]
    create_stages(config, Group())  # type: ignore[arg-type]
    found = [(o["name"], o["num_cpus"], o["scheduling_strategy"]) for o, _ in actors.made]
    assert found == [("s-0-0", 0, 1), ("s-1-0", 0, 2), (None, 0.25, 1), (None, 0.25, 2)]
    monkeypatch.setattr(ray, "get_actor", lambda name: f"actor {name}")
    assert find_stages(config, "s") == [["actor s-0-0"], ["actor s-1-0"]]


async def test_the_ranks_of_a_stage_meet_at_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = in_place_of_ray(monkeypatch, 2, 2).create()
    ranks[1][1].answers["node_id"] = "a third node"
    for rank in flat(ranks):
        rank.answers["load"] = info(num_parameters=10 * rank.place[0] + rank.place[1])
    infos = await load_stages(ranks)
    assert [found.num_parameters for found in infos] == [0, 1, 10, 11]
    for rank in flat(ranks):
        assert rank.called("load") == [(f"node-{rank.place[0]}:1234",)]
    # A local address if the ranks are on one node
    assert [stage[0].called("free_address") for stage in ranks] == [[(True,)], [(False,)]]
    (alone,) = flat(in_place_of_ray(monkeypatch, 1, 1).create())
    await load_stages([[alone]])
    assert alone.called("load") == [(None,)]


@pytest.mark.parametrize("answer", [True, False, ENDLESS, ray.exceptions.ActorDiedError()])
async def test_a_standby_is_used_if_all_of_it_is_there(
    monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    cluster: Cluster = in_place_of_ray(monkeypatch, 2, 1)
    monkeypatch.setattr(module, "_ANSWERS_WITHIN_S", 0.01)
    ranks = cluster.create()
    ranks[1][0].answers["is_unused"] = answer
    assert await unused(ranks) == (ranks if answer is True else [])
    assert [rank.dead.is_set() for rank in flat(ranks)] == [answer is not True] * 2


async def test_a_rebuild_that_is_given_up_ends_as_its_standby_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = in_place_of_ray(monkeypatch, 2, 1).create()
    num_turns, was_running = 0, True
    while was_running:
        asking = asyncio.create_task(unused(ranks))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        was_running = asking.cancel()
        await asyncio.wait({asking})
        assert asking.cancelled() == was_running, f"after {num_turns} turns"
        num_turns += 1
    assert num_turns > 2
