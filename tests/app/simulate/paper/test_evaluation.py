"""The committed rows of the paper's evaluation are what the code gives today."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.simulate.paper import evaluation
from app.simulate.paper.published import PublishedRow
from app.simulate.tables import paper_markdown

RESULTS = Path(evaluation.__file__).parents[1] / "results"
REPORT = json.loads((RESULTS / "paper.json").read_text("utf-8"))
COMMITTED = [PublishedRow.from_dict(row) for row in REPORT["rows"]]
AGAIN = (
    "run `legato simulate --paper --cache app/simulate/results/capacities.json"
    " --out app/simulate/results` and look at what changed"
)


def test_the_table_is_made_of_the_committed_rows() -> None:
    assert (RESULTS / "paper.md").read_text("utf-8") == paper_markdown(COMMITTED), AGAIN


def test_what_the_text_states_of_its_motivation_holds() -> None:
    bounded = [r for r in COMMITTED if r.bound and r.figure != "Figure 4"]
    assert {r.figure for r in bounded} == {
        "Figure 1a", "Figure 1b", "Figure 2", "Figure 5", "Figure 8",
    }  # fmt: skip
    assert all(r.deviation == 0.0 for r in bounded)


@pytest.mark.heavy
def test_rows_are_reproduced() -> None:
    """All but the capacity searches is run again: steps, Table 4, and the short runs."""
    capacities = json.loads((RESULTS / "capacities.json").read_text("utf-8"))
    fresh = evaluation.rows(capacities, REPORT["num_requests"], False, {})
    assert [(r.figure, r.setting, r.quantity, r.published, r.bound) for r in fresh] == [
        (r.figure, r.setting, r.quantity, r.published, r.bound) for r in COMMITTED
    ], AGAIN
    for row, committed in zip(fresh, COMMITTED, strict=True):
        assert row.simulated == pytest.approx(committed.simulated, rel=1e-6), (committed, AGAIN)
