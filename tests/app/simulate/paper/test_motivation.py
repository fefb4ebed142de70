"""The paper's motivation in short runs, with shorter lengths."""

from __future__ import annotations

import pytest

from app.simulate.paper.motivation import policy_rows, run
from app.simulate.paper.published import PublishedRow

pytestmark = pytest.mark.heavy


def test_policies_trade_throughput_for_latency_unless_stall_free() -> None:
    rows = policy_rows("sharegpt4/8")
    assert [row.deviation for row in rows if row.bound] == [0.0, 0.0]
    assert len({row.setting for row in rows}) == 5


def test_runs_repeat() -> None:
    one, two = (run("mistral-7b-a100", "sarathi", "fixed:500,20", 2.0, 20) for _ in range(2))
    assert one == two


def test_a_bound_holds_or_is_missed() -> None:
    assert PublishedRow("", "", "", 0.9, 0.8, "at least").deviation == 0.0
    assert PublishedRow("", "", "", 0.6, 0.8, "at least").deviation == pytest.approx(-0.25)
    assert PublishedRow("", "", "", 0.6, 0.8, "at most").deviation == 0.0
    row = PublishedRow("Figure 4", "prompt", "share", 0.6, 0.8, "at least")
    assert PublishedRow.from_dict(row.to_dict()) == row
