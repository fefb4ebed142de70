"""Every notebook runs from top to bottom, and shows what it gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest

from notebooks.render import FOLDER, MAX_BYTES, execute

pytestmark = pytest.mark.heavy

PATHS = sorted(FOLDER.glob("*.ipynb"))
LIVE = {"a_stall_live"}  # runs an engine: times of this machine, different each time
# The first draws the rows that tests/app/simulate/paper/test_evaluation.py makes again.
LONG = {"the_paper", "a_day_of_a_thousand_replicas", "where_should_the_work_run", *LIVE}
MARKS = {
    path.stem: [
        *([pytest.mark.ray] if path.stem in LIVE else []),
        *([pytest.mark.long] if path.stem in LONG else []),
    ]
    for path in PATHS
}
RUN = [pytest.param(path, id=path.stem, marks=MARKS[path.stem]) for path in PATHS]


def printed(notebook: Any) -> list[str]:
    """What each cell prints; pictures depend on fonts and are left out."""
    return [
        "".join(o["text"] for o in cell.outputs if o["output_type"] == "stream")
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def pictures(notebook: Any) -> list[int]:
    """How many pictures each cell shows."""
    return [
        sum("image/png" in o.get("data", {}) for o in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.parametrize("path", RUN)
def test_a_notebook_runs_and_its_outputs_are_committed(path: Path) -> None:
    committed, fresh = nbformat.read(path, as_version=4), execute(path)
    assert sum(pictures(fresh)) >= 1
    assert pictures(committed) == pictures(fresh), "run `make pictures`"
    if path.stem not in LIVE:
        assert printed(committed) == printed(fresh), "run `make pictures` and look at what changed"


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_a_notebook_is_small_and_names_no_machine(path: Path) -> None:
    text = path.read_text("utf-8")
    assert len(text.encode()) <= MAX_BYTES
    assert str(FOLDER.parent) not in text
    assert f"{Path.home()}/" not in text
