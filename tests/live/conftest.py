"""Live engines in this test process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.engine_client.live import LiveEngine
from app.settings.load import parse, resolve


@pytest.fixture
def make_engine(ray_cluster: None) -> Callable[..., LiveEngine]:
    """`make_engine(model_folder, parallel={...}, scheduling={...}, kv={...})`, not started."""

    def make(model: Path, **sections: dict[str, Any]) -> LiveEngine:
        sections = {key: dict(value) for key, value in sections.items()}
        sections.setdefault("kv", {}).setdefault("block_size", 4)
        sections["kv"].setdefault("memory_gib", 0.01)
        sections.setdefault("scheduling", {}).setdefault("max_requests", 64)
        # Whose start would compete with the next test's; tests/faults has engines with one.
        sections.setdefault("engine", {}).setdefault("standby", False)
        settings = parse({"model": {"path": str(model), **sections.pop("model", {})}, **sections})
        return LiveEngine(resolve(settings), "tiny")

    return make
