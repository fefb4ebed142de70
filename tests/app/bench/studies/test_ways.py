"""The comparison of ways, in small: every way has a row, and what did not move cost nothing."""

from __future__ import annotations

import json

import pytest

from app.bench.studies.ways import COLUMNS, Case, cells, study
from app.simulate.paper.published import DEPLOYMENTS

pytestmark = pytest.mark.heavy


def test_every_way_has_its_capacity() -> None:
    case = Case(DEPLOYMENTS[0], "arxiv", "strict", 2, 30, 0)
    rows = list(study(case))
    ways = [(row["way"], row["interconnect"]) for row in rows]
    assert ways == [
        ("colocated", ""),
        ("split", "nvlink"),
        ("split", "ethernet"),
        ("flexible", "nvlink"),
        ("flexible", "ethernet"),
    ]
    for row in rows:
        assert row["capacity_qps"] > 0.0
        assert row["capacity_qps_per_gpu"] == row["capacity_qps"] / 2
        assert row["prefill_engines"] == (row["way"] != "colocated")
        assert len(cells(row)) == len(COLUMNS)
    colocated, split, slower, flexible, _ = [row["compared"] for row in rows]
    assert colocated["moved_gb_per_request"] == 0.0
    assert split["moved_share"] > 0.9  # an answer of one token does not move
    assert flexible["moved_share"] < split["moved_share"]
    assert slower["handover_p50_s"] >= split["handover_p50_s"]
    json.dumps(rows, allow_nan=False)
