"""The folders and sizes of each rank's second tier of the prefix cache."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from actors.calibration.cache import cache_folder
from actors.engine.config import GIB, EngineConfig
from actors.executor.bit_class import bit_class_of
from actors.stage.spec import StageInfo, TierSpec
from actors.transport.shares import MEMORY, shares_root

_LAYOUT = 2  # to be increased when the byte layout of a block changes


async def tier_specs(config: EngineConfig, info: StageInfo) -> list[TierSpec]:
    """One per rank, stage after stage; empty without a second tier.

    An engine finds the blocks of earlier engines whose computation was the same.
    """
    if not config.kv.has_tier:
        return []
    stage, kv = config.stage, config.kv
    root = Path(kv.disk_cache_path) if kv.disk_cache_path else cache_folder() / "kv"
    versions = (_LAYOUT, _version("legato-serve"), _version("torch"))
    bits = await bit_class_of(stage, info)
    same = repr((bits, versions, stage.block_size, stage.num_stages))
    name = f"{Path(stage.model_path).name}-{hashlib.sha256(same.encode()).hexdigest()[:16]}"
    specs = []
    for number in range(stage.num_stages):
        for rank in range(stage.tensor_ranks):
            part = f"stage-{number}-rank-{rank}"
            folder = str(root / name / part)
            host, disk = int(kv.host_cache_gib * GIB), int(kv.disk_cache_gib * GIB)
            spec = TierSpec(f"{same} {part}", folder, host, disk, not config.is_rebuild)
            if kv.shared_cache_gib:
                shared = root_of_shares(config)
                spec = replace(
                    spec,
                    shared_root=str(shared),
                    shared_folder=str(shared / name / part),
                    shared_bytes=int(kv.shared_cache_gib * GIB),
                    between_nodes=kv.between_nodes,
                    direct_bytes=int(kv.direct_gib * GIB),
                )
            specs.append(spec)
    return specs


def root_of_shares(config: EngineConfig) -> Path:
    """Where the engines of this node share KV."""
    path = config.kv.shared_cache_path
    return shares_root(Path(path) if path else MEMORY)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
