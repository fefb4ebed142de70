"""Routers of a large fleet: what is added up over seeds, and a comparison in small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from app.bench.command import BENCHES, load
from app.bench.studies.routers import COLUMNS, cells, fewer_misses, together
from app.simulate.studies.routing import TRACES, RoutingRow


def row(routing: str, seed: int, missed: float, num_requests: int = 1000) -> RoutingRow:
    return RoutingRow(
        "documents", 1.0, routing, seed, num_requests, 0.1, 2.0 + seed, missed, missed, 0.0, 0.5
    )


def test_seeds_are_added_up_by_their_requests() -> None:
    rows = [row("prefix", 1, 0.04), row("slack", 1, 0.0), row("prefix", 2, 0.01, 3000)]
    prefix, slack = together(rows)
    assert (prefix.routing, prefix.num_seeds, prefix.num_requests) == ("prefix", 2, 4000)
    assert prefix.missed == pytest.approx((40 + 30) / 4000)
    assert (prefix.least_missed, prefix.most_missed) == (0.01, 0.04)
    assert prefix.ttft_p99_s == 3.5
    assert (slack.num_seeds, slack.missed) == (1, 0.0)
    assert len(cells(prefix)) == len(COLUMNS)


def test_the_judged_router_is_compared_with_the_best_other() -> None:
    rows = [row("round_robin", 1, 0.7), row("prefix", 1, 0.04), row("slack", 1, 0.01)]
    (found,) = fewer_misses(together(rows))
    assert (found["best_other"], found["fewer"]) == ("prefix", pytest.approx(0.75))
    (found,) = fewer_misses(together([row("prefix", 1, 0.0), row("slack", 1, 0.0)]))
    assert found["fewer"] is None
    assert fewer_misses(together(rows[:2])) == fewer_misses(together(rows[2:])) == []


@pytest.mark.heavy
def test_the_report_has_a_row_for_every_run(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    app: typer.Typer = load("routers", BENCHES["routers"])
    options = ["--engines", "2", "--seconds", "10", "--seeds", "1,2", "--routers", "prefix,slack"]
    result = CliRunner().invoke(app, [*options, "--traces", "documents", "--out", str(out)])
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert len(report["rows"]) == 2 * 2 * len(TRACES["documents"].rates)
    assert {row["seed"] for row in report["rows"]} == {1, 2}
    assert all(row["num_seeds"] == 2 for row in report["routers"])
    for wrong in (["--seeds", "one"], ["--routers", "magic"], ["--traces", "novels"]):
        result = CliRunner().invoke(app, [*options, *wrong])
        assert result.exit_code == 2, wrong
