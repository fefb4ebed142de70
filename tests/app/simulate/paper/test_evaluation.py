"""The committed rows of the paper's evaluation are what the code gives today."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from app.simulate.paper import costs, evaluation, steps
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


def agree(fresh: Iterable[PublishedRow], committed: Iterable[PublishedRow]) -> None:
    for row, before in zip(fresh, committed, strict=True):
        assert replace(row, simulated=0.0) == replace(before, simulated=0.0), AGAIN
        assert row.simulated == pytest.approx(before.simulated, rel=1e-6), (before, AGAIN)


def test_rows_of_costs_and_steps_are_reproduced() -> None:
    made = [
        *costs.cost_rows(), *steps.validation_rows(), *steps.interference_rows(),
        *steps.chunking_rows(),
    ]  # fmt: skip
    named = {(row.figure, row.setting, row.quantity) for row in made}
    agree(made, [r for r in COMMITTED if (r.figure, r.setting, r.quantity) in named])


@pytest.mark.long
def test_rows_are_reproduced() -> None:
    """All but the capacity searches is run again: steps, Table 4, and the short runs."""
    capacities = json.loads((RESULTS / "capacities.json").read_text("utf-8"))
    agree(evaluation.rows(capacities, REPORT["num_requests"], False, {}), COMMITTED)
