"""Where each rank keeps its KV blocks: found by the next engine exactly if they are the same."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.calibration.cache import cache_folder
from actors.engine.config import GIB, EngineConfig, KVMemory
from actors.executor.kv_tier import root_of_shares, tier_specs
from actors.stage.spec import StageSpec, TierSpec
from actors.transport.shares import MEMORY, shares_root
from tests.actors.executor.paper_ranks import info
from tests.actors.scheduling.short_lives import config

KV = KVMemory(host_cache_gib=1.5, disk_cache_gib=4.0, disk_cache_path="/disk")


@pytest.fixture
def engine(tmp_path: Path) -> EngineConfig:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    spec = StageSpec(str(tmp_path), num_stages=2, tensor_ranks=2)
    return EngineConfig(spec, config(), kv=KV)


def specs(engine: EngineConfig, **report: Any) -> list[TierSpec]:
    return asyncio.run(tier_specs(engine, info(**report)))


def test_every_rank_has_a_folder_of_its_own(engine: EngineConfig) -> None:
    found = specs(engine)
    folders = [Path(spec.folder) for spec in found]
    assert [folder.name for folder in folders] == [
        f"stage-{stage}-rank-{rank}" for stage in (0, 1) for rank in (0, 1)
    ]
    (above,) = {folder.parent for folder in folders}
    assert above.parent == Path("/disk")
    assert above.name.startswith(Path(engine.stage.model_path).name)
    assert {(spec.host_bytes, spec.disk_bytes) for spec in found} == {(3 * GIB // 2, 4 * GIB)}
    assert len({spec.key for spec in found}) == 4


def test_the_next_engine_finds_them_whatever_its_sizes(engine: EngineConfig) -> None:
    kv = replace(KV, host_cache_gib=0.5, gib=1.0)
    later = replace(engine, kv=kv, stage=replace(engine.stage, max_requests=3, num_threads=5))
    pairs = zip(specs(engine), specs(later, available_bytes=7), strict=True)
    assert all((one.key, one.folder) == (other.key, other.folder) for one, other in pairs)


@pytest.mark.parametrize(
    ("stage", "report"),
    [
        ({"block_size": 32}, {}),
        ({"num_stages": 1}, {}),
        ({"quantization": "int8"}, {}),
        ({"kv_dtype": "fp8"}, {}),
        ({}, {"backend": "cpu"}),
    ],
)
def test_blocks_of_other_bytes_are_not_found(
    engine: EngineConfig, stage: dict[str, Any], report: dict[str, Any]
) -> None:
    other = replace(engine, stage=replace(engine.stage, **stage))
    for one, found in zip(specs(engine), specs(other, **report), strict=False):
        assert one.key != found.key
        assert one.folder != found.folder


def test_a_disk_that_fails_ends_a_first_start_but_no_rebuild(engine: EngineConfig) -> None:
    assert all(spec.is_first_start for spec in specs(engine))
    assert not any(spec.is_first_start for spec in specs(replace(engine, is_rebuild=True)))


def test_without_a_path_they_are_in_the_users_cache(engine: EngineConfig) -> None:
    kv = replace(KV, disk_cache_path=None)
    assert Path(specs(replace(engine, kv=kv))[0].folder).parents[1] == cache_folder() / "kv"


def test_engines_of_a_node_share_one_folder_of_each_rank(engine: EngineConfig) -> None:
    kv = KVMemory(shared_cache_gib=0.5, shared_cache_path="/memory")
    found = specs(replace(engine, kv=kv))
    assert {spec.shared_root for spec in found} == {str(shares_root(Path("/memory")))}
    assert {spec.shared_bytes for spec in found} == {GIB // 2}
    assert len({spec.shared_folder for spec in found}) == 4
    for spec in found:
        assert Path(spec.shared_folder).parents[1] == root_of_shares(replace(engine, kv=kv))
        assert Path(spec.shared_folder).name == Path(spec.folder).name
    assert root_of_shares(engine).parent == MEMORY
    assert not any(spec.shared_bytes for spec in specs(engine))


@pytest.mark.parametrize(("host_gib", "disk_gib", "count"), [(0, 0, 0), (1, 0, 4), (0, 1, 4)])
def test_there_is_a_tier_where_it_has_a_size(
    engine: EngineConfig, host_gib: float, disk_gib: float, count: int
) -> None:
    kv = KVMemory(host_cache_gib=host_gib, disk_cache_gib=disk_gib)
    assert len(specs(replace(engine, kv=kv))) == count
