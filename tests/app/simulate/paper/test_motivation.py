"""The paper's motivation: what stalls, and who has the bubbles."""

from __future__ import annotations

import pytest

from app.simulate.paper.motivation import bubble_rows, policy_rows, run, stall_rows
from app.simulate.paper.published import PublishedRow

pytestmark = pytest.mark.heavy


def test_the_statements_hold() -> None:
    rows = [
        *stall_rows("sharegpt4/4", "arxiv"),
        *policy_rows("sharegpt4/4"),
        *bubble_rows("sharegpt4/2"),
    ]
    bounded = [row for row in rows if row.bound]
    assert len(bounded) == 6
    for row in bounded:
        assert row.deviation == 0.0, row


def test_runs_repeat() -> None:
    one, two = (run("mistral-7b-a100", "sarathi", "fixed:500,20", 2.0, 20) for _ in range(2))
    assert one == two


def test_a_bound_holds_or_is_missed() -> None:
    assert PublishedRow("", "", "", 0.9, 0.8, "at least").deviation == 0.0
    assert PublishedRow("", "", "", 0.6, 0.8, "at least").deviation == pytest.approx(-0.25)
    assert PublishedRow("", "", "", 0.6, 0.8, "at most").deviation == 0.0
    row = PublishedRow("Figure 4", "prompt", "share", 0.6, 0.8, "at least")
    assert PublishedRow.from_dict(row.to_dict()) == row
