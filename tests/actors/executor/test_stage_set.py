"""The stages of a replica: built, sized, connected, asked. No process is started."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import actors.executor.stage_set as module
from actors.engine.config import GIB, CacheSizes, KVMemory
from actors.executor.stage_set import StageDied, StagesFailed
from actors.scheduling.events import Fetch, Save, TierChange
from actors.scheduling.request import Grammar
from kernels.registry import BackendError
from tests.actors.executor.paper_ranks import (
    ENDLESS,
    Cluster,
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

GRAMMAR = Grammar("regex", "a+")
NUM_USEFUL = 8 * 64 // 4  # blocks of `short_lives.config` at full length


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return in_place_of_ray(monkeypatch, 2, 2)


# ---- building ------------------------------------------------------------------------------------


async def test_every_rank_is_loaded_then_given_its_memory(cluster: Cluster) -> None:
    kv = KVMemory(gib=40 * 1024 / GIB, swap_gib=6.5 * 1024 / GIB)
    stages = stage_set(cluster, kv=kv)
    most = settings().scheduler.most_requests
    assert await stages.build() == (info(), CacheSizes(40, 6, most))
    await until(lambda: all(rank.called("watch") for rank in flat(cluster.sets[0])))
    for rank in flat(cluster.sets[0]):
        names = [name for name, _ in rank.calls]
        assert names.index("load") < names.index("allocate") < names.index("watch")
        assert rank.called("allocate") == [(40, 6, most)]
        assert names.index("allocate") < names.index("settle")
        assert rank.called("settle") == [(module._FOR_MEMORY_S,)]
        assert rank.called("load") == [(f"node-{rank.place[0]}:1234",)]
    assert stages.pids == [[0, 1], [10, 11]]
    stages.close()


@pytest.mark.parametrize(
    ("kv", "device", "reports", "num_blocks"),
    [
        (KVMemory(gib=100.9 * 1024 / GIB), "cuda", {}, 100),
        (KVMemory(fraction=0.25), "cuda", {"available_bytes": 400 << 10}, 100),
        (KVMemory(fraction=0.25), "cpu", {"available_bytes": 400 << 10}, 25),  # shared by four
        (KVMemory(fraction=0.5), "cuda", {"available_bytes": 1 << 40}, NUM_USEFUL + 1),
        (KVMemory(fraction=0.5), "cuda", {"available_bytes": 0}, 2),
    ],
)
async def test_blocks_fit_the_memory_and_are_no_more_than_useful(
    cluster: Cluster, kv: KVMemory, device: str, reports: dict[str, int], num_blocks: int
) -> None:
    cluster.answers = [{"load": info(**reports)}]
    spec = replace(settings().stage, device=device)
    stages = stage_set(cluster, kv=kv, stage=spec)
    assert (await stages.build())[1].num_blocks == num_blocks
    stages.close()


async def test_the_rank_with_the_least_room_decides(cluster: Cluster) -> None:
    stages = stage_set(cluster, kv=KVMemory(gib=100 * 1024 / GIB))
    cluster.sets[0][1][0].answers["load"] = info(kv_block_bytes=1 << 11)
    assert (await stages.build())[1].num_blocks == 50
    stages.close()


@pytest.mark.parametrize(
    ("kv", "message"),
    [
        (KVMemory(gib=2.0), "^kv.memory_gib: 2 GiB, but 1.50 GiB are free$"),
        (KVMemory(gib=1.0, direct_gib=1.0), "1 GiB, but 0.50 GiB are free beside `kv.direct_gib`$"),
    ],
)
async def test_a_cache_that_does_not_fit_a_gpu_is_refused_by_its_setting(
    cluster: Cluster, kv: KVMemory, message: str
) -> None:
    large = {"load": info(available_bytes=2 * GIB, kv_block_bytes=GIB // 50)}
    cluster.answers = [large]
    spec = replace(settings().stage, device="cuda")
    stages = stage_set(cluster, kv=kv, stage=spec)
    cluster.sets[0][0][1].answers["load"] = info(
        available_bytes=3 * GIB // 2, kv_block_bytes=GIB // 50
    )
    with pytest.raises(StagesFailed, match=message):
        await stages.build()
    assert all(rank.dead.is_set() for rank in flat(cluster.sets[0]))


@pytest.mark.parametrize("num_deaths", [1, 2, 3])
async def test_stages_that_die_while_they_load_are_started_again(
    cluster: Cluster, num_deaths: int
) -> None:
    cluster.answers = [{"load": died()} for _ in range(num_deaths)]
    stages = stage_set(cluster)
    if num_deaths == 3:
        with pytest.raises(StageDied, match="died while loading"):
            await stages.build()
    else:
        await stages.build()
        assert not any(rank.dead.is_set() for rank in flat(cluster.sets[-1]))
        stages.close()
    assert len(cluster.sets) == min(num_deaths + 1, 3)
    assert all(rank.dead.is_set() for lost in cluster.sets[:num_deaths] for rank in flat(lost))


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"load": raised(ValueError("model.safetensors: cut off"))}, "model.safetensors: cut off"),
        ({"load": raised(KeyError("layers"))}, "^KeyError: 'layers'$"),
        ({"load": raised(BackendError("parallel.backend: none"))}, "^parallel.backend: none$"),
        ({"load": ENDLESS}, "loading took over 0 s"),
        ({"load_adapter": "no adapter_config.json"}, "no adapter_config.json"),
        ({"load_adapter": ENDLESS}, "folder: not loaded within 0 s"),
        ({"allocate": raised(ValueError("kv.swap_gib: too large"))}, r"^kv\.swap_gib: too large$"),
        ({"allocate": OSError("no socket")}, "^the stages could not be connected: OSError: no soc"),
        ({"allocate": raised(RuntimeError("no kernel image"))}, "^RuntimeError: no kernel image$"),
        ({"open_tier": raised(ValueError("kv.disk_cache_path: no"))}, "^kv.disk_cache_path: no$"),
    ],
)
async def test_stages_that_cannot_start_say_why_and_end(
    cluster: Cluster, tmp_path: Path, answers: dict[str, Any], message: str
) -> None:
    cluster.answers = [answers]
    stages = stage_set(
        cluster,
        load_timeout_s=0.05 if ENDLESS in answers.values() else 60.0,
        adapters=((1, "folder"),),
        kv=KVMemory(host_cache_gib=1.0),
        stage=drawn(tmp_path),
    )
    with pytest.raises(StagesFailed, match=message) as caught:
        await stages.build()
    assert not isinstance(caught.value, StageDied)  # which would be tried again
    assert len(cluster.sets) == 1
    assert all(rank.dead.is_set() for rank in flat(cluster.sets[0]))
    assert stages.pipeline is None
    with pytest.raises(StagesFailed, match="no stages"):
        await stages.move(Save(1, ()))


async def test_a_stage_that_hangs_while_it_starts_is_killed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_REPORT_EVERY_S", 0.0)
    monkeypatch.setattr(module, "_SILENT_S", 0.01)
    hung = {"load": ENDLESS, "loading_progress": ENDLESS}
    cluster.answers = [hung, {"load": ENDLESS, "loading_progress": [0.5, 0.6, ENDLESS]}]
    stages = stage_set(cluster)
    async with asyncio.timeout(5):
        await stages.build()
    assert len(cluster.sets) == 3
    stages.close()


@pytest.mark.parametrize("is_rebuild", [False, True])
async def test_a_model_without_a_tokenizer_serves_without_grammars(
    cluster: Cluster, is_rebuild: bool
) -> None:
    cluster.answers = [{"compile_grammar": raised(ValueError("no tokenizer"))}]
    stages = stage_set(cluster, grammars=True, is_rebuild=is_rebuild)
    await stages.build()
    asked = [rank.place for rank in flat(cluster.sets[0]) if rank.called("compile_grammar")]
    assert asked == ([] if is_rebuild else [(1, 0)])  # streams wait for a rebuild
    stages.close()


# ---- calls ---------------------------------------------------------------------------------------


async def test_a_grammar_is_compiled_where_tokens_are_sampled(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = stage_set(cluster)
    await stages.build()
    last = cluster.sets[0][1][0]
    last.answers["compile_grammar"] = "unbalanced ("
    assert await stages.compile_grammar(GRAMMAR) == "unbalanced ("
    assert [r.place for r in flat(cluster.sets[0]) if r.called("compile_grammar")] == [(1, 0)]
    last.answers["compile_grammar"] = ENDLESS
    monkeypatch.setattr(module, "_COMPILE_LIMIT_S", 0.01)
    with pytest.raises(StagesFailed, match="not compiled within"):
        await stages.compile_grammar(GRAMMAR)
    monkeypatch.setattr(module, "_COMPILE_LIMIT_S", 60.0)
    monkeypatch.setattr(module, "_PREPARE_LIMIT_S", 0.01)
    await stages.prepare({GRAMMAR})  # returns: a step compiles what is left
    last.answers["compile_grammar"] = raised(OSError("no memory\nfor it"))
    with pytest.raises(StagesFailed, match=r"^no memory$"):
        await stages.compile_grammar(GRAMMAR)
    last.die()
    with pytest.raises(StagesFailed):
        await stages.prepare({GRAMMAR})
    stages.close()


async def test_a_move_is_answered_by_every_rank(cluster: Cluster) -> None:
    stages = stage_set(cluster)
    await stages.build()
    moved = (1, TierChange((b"d",), ()))
    for rank in flat(cluster.sets[0]):
        rank.answers["move"] = moved
    fetch = Fetch(1, ((3, b"d"),), 2.0)
    assert await stages.move(fetch) == [moved] * 4
    assert {rank.called("move")[0] for rank in flat(cluster.sets[0])} == {(fetch,)}
    cluster.sets[0][0][1].die()
    with pytest.raises(StagesFailed, match="a move of KV failed: ActorDiedError"):
        await stages.move(Save(2, ((3, b"d"),)))
    stages.close()
