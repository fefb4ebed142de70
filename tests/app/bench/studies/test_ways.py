"""The comparison of ways, in small: every way has a row, and what did not move cost nothing."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from app.bench.studies.ways import (
    COLUMNS,
    as_markdown,
    cells,
    chosen,
    command,
)
from app.bench.studies.ways_capacity import Case, study
from app.bench.studies.ways_ledger import Ledger
from app.bench.studies.ways_loads import work_of
from app.simulate.paper.published import DEPLOYMENTS


@pytest.mark.long
def test_every_way_has_its_capacity() -> None:
    case = Case(DEPLOYMENTS[0], "arxiv", "strict", 2, 12, 0)
    rows = list(study(case, ("split", "flexible"), ("nvlink", "ethernet"), Ledger()))
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
        assert row["arrive_s"] == 12 / row["capacity_qps"]
        assert len(cells(row)) == len(COLUMNS)
    colocated, split, slower, flexible, _ = [row["compared"] for row in rows]
    assert colocated["moved_gb_per_request"] == 0.0
    assert split["moved_share"] > 0.9  # an answer of one token does not move
    assert flexible["moved_share"] < split["moved_share"]
    assert slower["handover_p50_s"] >= split["handover_p50_s"]
    json.dumps(rows, allow_nan=False)


def row(way: str, per_gpu: float, prefill: int = 0, slo: str = "strict") -> dict[str, Any]:
    return {
        "deployment": "yi-34b-a100-tp2",
        "dataset": "arxiv",
        "slo": slo,
        "way": way,
        "interconnect": "" if way == "colocated" else "ethernet",
        "prefill_engines": prefill,
        "other_engines": 4 - prefill,
        "capacity_qps": 8 * per_gpu,
        "capacity_qps_per_gpu": per_gpu,
        "over_colocated": per_gpu / 0.25,
        "limit": "scheduling delay",
        "seed": 0,
        "at_capacity": {
            "ttft_p50_s": 10 * per_gpu,
            "ttft_p99_s": 20 * per_gpu,
            "tbt_p99_s": per_gpu,
        },
        "compared": None,
    }


def test_a_line_of_each_table_holds_the_three_ways() -> None:
    rows = [row("colocated", 0.25), row("split", 0.2, 3), row("flexible", 0.275, 1)]
    capacities, latencies = as_markdown([*rows, row("colocated", 0.3, slo="relaxed")]).split("\n\n")
    assert capacities.splitlines()[2:] == [
        "| Yi-34B, 2 A100 TP2 | arxiv | strict | ethernet | 0.25 | 0.2 | 3+1 | 0.275 | 1+3 "
        "| 0.80 | 1.10 |"
    ]
    assert latencies.splitlines()[2:] == [
        "| Yi-34B, 2 A100 TP2 | arxiv | strict | ethernet | 2.5 / 2.0 / 2.8 | 5.0 / 4.0 / 5.5 "
        "| 250 / 200 / 275 | - / - / - |"
    ]
    capacities, latencies = as_markdown(rows[:2]).split("\n\n")
    assert capacities.endswith("| 0.25 | 0.2 | 3+1 | - | - | 0.80 | - |")
    assert latencies.endswith("| 2.5 / 2.0 / - | 5.0 / 4.0 / - | 250 / 200 / - | - / - / - |\n")


def test_names_are_chosen_from_those_there_are() -> None:
    assert chosen("", ("a", "b"), "letter") == ["a", "b"]
    assert chosen("b", ("a", "b"), "letter") == ["b"]
    with pytest.raises(typer.BadParameter, match="unknown letter 'c'; known: a, b"):
        chosen("a,c", ("a", "b"), "letter")


def test_rows_of_any_length_are_reported_in_order(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "c.json")
    rows = [row("flexible", 0.275, 1), row("colocated", 0.3, slo="relaxed"), row("colocated", 0.25)]
    others = [row("split", 0.2, 3) | {"seed": 1}, row("split", 0.2, 3) | {"other_engines": 2}]
    others.append(row("split", 0.2, 3) | {"interconnect": "nvlink"})
    for number, one in enumerate([*rows, *others]):
        ledger.row(f"{number}", partial(dict, one))
    out = tmp_path / "o.json"
    app = typer.Typer()
    app.command()(command)
    arguments = ["--cache", str(ledger.path), "--no-search", "--links", "ethernet"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(out)])
    assert result.exit_code == 0, result.output
    shown = [(r["slo"], r["way"]) for r in json.loads(out.read_text())["rows"]]
    assert shown == [("strict", "colocated"), ("strict", "flexible"), ("relaxed", "colocated")]


def test_rows_found_earlier_become_one_report(tmp_path: Path) -> None:
    """Nothing is simulated: the cost model would need minutes for so many requests."""
    cache, out, markdown = (tmp_path / name for name in ("c.json", "o.json", "m.md"))
    num_requests = round(1e5 * work_of("yi-34b-a100-tp2", "arxiv").qps(0, 4))
    for slo in ("strict", "relaxed"):
        case = Case(DEPLOYMENTS[1], "arxiv", slo, 4, num_requests, 0)
        found = [row("colocated", 0.25, slo=slo), row("split", 0.2, 3, slo)]
        found.append(row("flexible", 0.275, 1, slo))
        ledger = Ledger(cache)
        for r in found:
            ledger.row(case.key(r["way"], r["interconnect"]), partial(dict, r))
    app = typer.Typer()
    app.command()(command)
    arguments = ["--deployments", "yi-34b-a100-tp2", "--datasets", "arxiv", "--links", "ethernet"]
    arguments += [
        "--objectives",
        "strict,relaxed",
        "--seconds",
        "1e5",
        "--cache",
        str(cache),
        "--out",
        str(out),
    ]
    result = CliRunner().invoke(app, [*arguments, "--markdown", str(markdown)])
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert [r["way"] for r in report["rows"]] == ["colocated", "split", "flexible"] * 2
    assert report["settings"]["seed"] == 0
    assert markdown.read_text() == as_markdown(report["rows"])
    assert markdown.read_text().count("Yi-34B") == 4
