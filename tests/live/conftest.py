"""Real Ray, in this test process as the driver; one cluster per run, gone at the end."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.live_engine import LiveEngine
from app.settings import parse, resolve


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    # Ray keeps sockets below this folder: short, or they exceed the system's path limit.
    folder = tempfile.mkdtemp(prefix="lgt", dir="/tmp")
    root = str(Path(__file__).resolve().parents[2])
    ray.init(
        num_cpus=16,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _temp_dir=folder,
        runtime_env={"env_vars": {"PYTHONPATH": root}},
    )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def make_engine(ray_cluster: None) -> Callable[..., LiveEngine]:
    """`make_engine(model_folder, parallel={...}, scheduling={...}, kv={...})`, not started."""

    def make(model: Path, **sections: dict[str, Any]) -> LiveEngine:
        sections = {key: dict(value) for key, value in sections.items()}
        sections.setdefault("kv", {}).setdefault("block_size", 4)
        sections["kv"].setdefault("memory_gib", 0.01)
        sections.setdefault("scheduling", {}).setdefault("max_requests", 64)
        settings = parse({"model": {"path": str(model), **sections.pop("model", {})}, **sections})
        return LiveEngine(resolve(settings), "tiny")

    return make
