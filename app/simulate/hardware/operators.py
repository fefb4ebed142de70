"""The published operator timings, as `ingest` keeps them in `configs/hardware/operators`."""

from __future__ import annotations

import functools
import json
from typing import Any

from app import paths

CONFIGS = paths.CONFIGS / "hardware"


@functools.cache
def read_operators(name: str) -> dict[str, Any]:
    """Medians in milliseconds of one device ("a100", "a40", "h100") or of the "networks"."""
    data: dict[str, Any] = json.loads((CONFIGS / "operators" / f"{name}.json").read_text("utf-8"))
    return data
