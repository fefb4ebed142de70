"""Cost models as files: JSON with one key a line, for people to read and compare."""

from __future__ import annotations

import json
from pathlib import Path

from actors.scheduling.cost.model import CostModel


def load_cost_model(path: str | Path) -> CostModel:
    """Read what `save_cost_model` wrote; raises OSError or ValueError."""
    return CostModel.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))


def save_cost_model(model: CostModel, path: str | Path) -> None:
    """Write a cost model, tables folded into one line each."""
    rows = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in model.to_dict().items())
    Path(path).write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
