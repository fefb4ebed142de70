"""The committed study of budgets is what the committed capacities give."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from app.simulate.studies import budgets

RESULTS = Path(budgets.__file__).parents[1] / "results"


def test_the_table_has_every_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = shutil.copy(RESULTS / "capacities.json", tmp_path)
    arguments = ["budgets", "--cache", str(cache), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    budgets.main()
    for name in ("budgets.md", "capacities.json"):
        assert (tmp_path / name).read_text("utf-8") == (RESULTS / name).read_text("utf-8")
    made, kept = (
        json.loads((at / "budgets.json").read_text("utf-8")) for at in (tmp_path, RESULTS)
    )
    assert [row.keys() for row in made] == [row.keys() for row in kept]
    for row, other in zip(made, kept, strict=True):
        for key, value in row.items():  # sums are rounded otherwise from Python 3.12 on
            assert value == (pytest.approx(other[key]) if isinstance(value, float) else other[key])
    assert "| - |" not in (tmp_path / "budgets.md").read_text("utf-8")
