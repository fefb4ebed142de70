"""The committed study of budgets is what the committed capacities give."""

from __future__ import annotations

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
    for name in ("budgets.md", "budgets.json", "capacities.json"):
        assert (tmp_path / name).read_text("utf-8") == (RESULTS / name).read_text("utf-8")
    assert "| - |" not in (tmp_path / "budgets.md").read_text("utf-8")
