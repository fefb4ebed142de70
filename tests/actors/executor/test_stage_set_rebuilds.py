"""Lost stages are replaced, from a standby if there is one. No process of a stage is started."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.engine.config import KVMemory
from actors.executor.stage_set import StageSet, StagesFailed
from actors.scheduling.plan import Slice, StepPlan
from tests.actors.executor.paper_ranks import (
    ENDLESS,
    HERE,
    Cluster,
    Rank,
    died,
    drawn,
    flat,
    in_place_of_ray,
    info,
    raised,
    settings,
    stage_set,
    until,
)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return in_place_of_ray(monkeypatch, 2, 2)


class Listener:
    def __init__(self, stages: StageSet) -> None:
        self.answers: list[Any] = []
        self.losses: list[str] = []
        self.standbys: list[str] = []
        stages.listen(self.answers.append, self.losses.append, self.standbys.append)


@pytest.mark.parametrize("kv", [KVMemory(fraction=0.1), KVMemory(gib=0.001)])
async def test_new_stages_have_the_sizes_and_listeners_of_the_old(
    cluster: Cluster, kv: KVMemory
) -> None:
    stages = stage_set(cluster, kv=kv, stage=replace(settings().stage, device="cuda"))
    listener = Listener(stages)
    _, sizes = await stages.build()
    await until(lambda: all(rank.called("watch") for rank in flat(cluster.sets[0])))
    cluster.sets[0][1][0].die()
    await until(lambda: listener.losses)
    assert listener.losses == ["stage 1 rank 0 died: ActorDiedError"]
    cluster.answers = [{"load": info(available_bytes=0)}]  # the old ones' memory is not free yet
    await stages.rebuild()
    assert all(rank.dead.is_set() for rank in flat(cluster.sets[0]))
    for rank in flat(cluster.sets[1]):
        assert rank.called("allocate") == [tuple(sizes)]
        assert rank.called("settle") == [(0.0,)]  # streams wait
    assert stages.pids == [[1000, 1001], [1010, 1011]]
    assert stages.pipeline is not None
    stages.pipeline.submit(StepPlan(0, (Slice(5, 0, 3, True), Slice(6, 0, 3, False))))
    await until(lambda: listener.answers)
    assert listener.answers[0].tokens == ((5, 7),)
    cluster.sets[1][0][1].die()
    await until(lambda: len(listener.losses) == 2)
    stages.close()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as made:
        yield made
        made.kill()


async def test_a_rebuild_that_fails_leaves_nothing_and_the_next_one_is_free(
    cluster: Cluster,
) -> None:
    stages = stage_set(cluster)
    await stages.build()
    cluster.answers = [{"load": raised(MemoryError("no memory"))}, {"allocate": died()}]
    for message in ("no memory", "could not be connected"):
        with pytest.raises(StagesFailed, match=message):
            await stages.rebuild()
        assert stages.pipeline is None
        assert all(rank.dead.is_set() for rank in flat(cluster.sets[-1]))
    await stages.rebuild()
    assert stages.pipeline is not None
    assert len(cluster.sets) == 4
    stages.close()


async def test_a_process_of_this_node_that_does_not_end_is_killed(
    cluster: Cluster, process: subprocess.Popen[bytes]
) -> None:
    stages = stage_set(cluster)
    cluster.sets[0][0][1].answers |= {"pid": process.pid, "node_id": HERE}
    cluster.sets[0][1][1].answers |= {"pid": 1 << 22, "node_id": HERE}  # it has died already
    await stages.build()
    assert [found.pid for found in stages.here] == [process.pid]
    assert process.poll() is None
    await stages.rebuild()
    assert process.wait(10) == -signal.SIGKILL
    stages.close()


async def test_adapters_are_loaded_into_new_stages(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    stages = stage_set(cluster, adapters=((1, "first"),))
    await stages.build()
    assert await stages.load_adapter(2, "second") is None
    cluster.sets[0][1][0].answers["load_adapter"] = "rank too high"
    assert await stages.load_adapter(3, "third") == "rank too high"
    cluster.answers = [{"load_adapter": [None, "its folder is gone"]}]
    await stages.rebuild()
    for rank in flat(cluster.sets[1]):
        assert rank.called("load_adapter") == [(1, "first"), (2, "second")]
    assert "adapter slot 2 is lost: its folder is gone" in caplog.text
    assert stages.adapters == {1: "first"}
    for error, line in (
        (raised(ValueError("no room\nfor it")), "no room"),
        (died(), "The actor died unexpectedly before finishing this task."),
    ):
        for rank in flat(cluster.sets[1]):
            rank.answers["load_adapter"] = error
        with pytest.raises(StagesFailed) as caught:
            await stages.load_adapter(4, "fourth")
        assert str(caught.value) == line
    stages.close()


async def test_an_adapter_that_never_loads_costs_a_rebuild_that_adapter_alone(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """As from a folder of a network that hangs."""
    stages = stage_set(cluster, adapters=((1, "first"), (2, "second")), load_timeout_s=0.2)
    await stages.build()
    cluster.answers = [{"load_adapter": [ENDLESS, None]}]
    await stages.rebuild()
    assert "adapter slot 1 is lost: first: not loaded within 0 s" in caplog.text
    assert stages.adapters == {2: "second"}
    calls = [name for name, _ in cluster.sets[1][0][0].calls if name.startswith("l")]
    assert calls[-3:] == ["load_adapter", "leave_load", "load_adapter"]
    stages.close()


async def test_adapters_are_loaded_one_at_a_time_each_within_its_own_limit(
    cluster: Cluster,
) -> None:
    stages = stage_set(cluster, load_timeout_s=0.2)
    await stages.build()
    first = cluster.sets[0][0][0]
    first.answers["load_adapter"] = [ENDLESS, None]
    answers = await asyncio.gather(stages.load_adapter(1, "hangs"), stages.load_adapter(2, "next"))
    assert answers == ["hangs: not loaded within 0 s", None]
    names = [name for name, _ in first.calls if name in ("load_adapter", "leave_load")]
    assert names == ["load_adapter", "leave_load", "load_adapter"]
    stages.close()


async def test_no_adapter_is_loaded_while_stages_are_rebuilt(cluster: Cluster) -> None:
    """Else the rebuild, which has seen the slot's first adapter, may fill it once more with it."""
    stages = stage_set(cluster, adapters=((1, "first"),))
    await stages.build()
    waiting = asyncio.create_task(stages.load_adapter(1, "second"))
    await until(lambda: cluster.sets[0][0][0].called("load_adapter")[1:])
    rebuilding = asyncio.create_task(stages.rebuild())
    await until(lambda: len(cluster.sets) == 2 and cluster.sets[1][0][0].called("load"))
    with pytest.raises(StagesFailed, match="being rebuilt"):
        await stages.load_adapter(1, "third")
    with pytest.raises(StagesFailed):
        await waiting
    await rebuilding
    assert stages.adapters == {}  # no request may meet the first one in place of the second
    assert not cluster.sets[1][0][0].called("load_adapter")
    assert await stages.load_adapter(1, "third") is None
    assert stages.adapters == {1: "third"}
    stages.close()


async def test_a_tier_must_have_its_disk_at_the_first_start_alone(
    cluster: Cluster, tmp_path: Path
) -> None:
    stages = stage_set(cluster, kv=KVMemory(host_cache_gib=1.0), stage=drawn(tmp_path))
    for rank in flat(cluster.sets[0]):
        rank.answers["open_tier"] = (b"found", bytes(rank.place))
    await stages.build()
    assert stages.tier == tuple((b"found", bytes(rank.place)) for rank in flat(cluster.sets[0]))
    await stages.rebuild()
    for number, is_first_start in ((0, True), (1, False)):
        specs = [rank.called("open_tier")[0][0] for rank in flat(cluster.sets[number])]
        assert [spec.is_first_start for spec in specs] == [is_first_start] * 4
        assert len({spec.folder for spec in specs}) == 4
    assert stages.tier == ((),) * 4
    stages.close()


# ---- the standby ---------------------------------------------------------------------------------


def standby(cluster: Cluster, name: str, **answers: Any) -> list[list[Rank]]:
    cluster.answers.append(answers)
    made = cluster.create()
    cluster.named |= {f"{name}-{r.place[0]}-{r.place[1]}": r for r in flat(made)}
    return made


async def test_a_rebuild_uses_the_standby_once(cluster: Cluster) -> None:
    stages = stage_set(cluster, standby=True)
    listener = Listener(stages)
    await stages.build()
    with pytest.raises(ValueError, match="gone-0-0"):
        stages.stand_by("gone")
    assert stages.standby == "starting"
    ready = standby(cluster, "s")
    stages.stand_by("s")
    assert stages.standby == "ready"
    await stages.rebuild()
    assert all(rank.called("allocate") for rank in flat(ready))
    assert (len(cluster.sets), listener.standbys, stages.standby) == (2, ["s"], "starting")
    await stages.rebuild()
    assert (len(cluster.sets), listener.standbys) == (3, ["s"])
    stages.stand_by("s")
    stages.stand_by(None)
    assert stages.standby == "starting"
    stages.close()


@pytest.mark.parametrize("answer", [False, died()])
async def test_a_standby_that_cannot_be_used_is_replaced(cluster: Cluster, answer: Any) -> None:
    stages = stage_set(cluster, standby=True)
    await stages.build()
    unfit = standby(cluster, "s", is_unused=answer)
    stages.stand_by("s")
    await stages.rebuild()
    assert all(rank.dead.is_set() for rank in flat(unfit))
    assert all(rank.called("allocate") for rank in flat(cluster.sets[2]))
    stages.close()


async def test_an_engine_without_a_standby_says_so(cluster: Cluster) -> None:
    assert stage_set(cluster).standby == "none"
