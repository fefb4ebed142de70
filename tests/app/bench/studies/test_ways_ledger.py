"""Nothing that a ledger holds is found twice, whoever has found it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.bench.studies.ways_ledger import Found, Ledger


def never() -> Found:
    raise AssertionError("it is known already")


@pytest.mark.parametrize("name", ["", "folder/ways.json"])
def test_what_was_found_is_not_sought_again(tmp_path: Path, name: str) -> None:
    ledger = Ledger(tmp_path / name if name else None)
    assert ledger.row("a", lambda: {"qps": 1.0}) == {"qps": 1.0}
    assert ledger.load("a", lambda: {"passed": True}) == {"passed": True}
    assert ledger.row("a", never) == {"qps": 1.0}
    assert ledger.load("a", never) == {"passed": True}


def test_a_row_is_kept_that_loads_are_simulated_for(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ways.json")
    ledger.row("a", lambda: ledger.load("b", lambda: {"passed": True}))
    assert ledger.rows == Ledger(ledger.path).rows == {"a": {"passed": True}}


def test_a_ledger_is_read_again_and_keeps_what_others_add(tmp_path: Path) -> None:
    path = tmp_path / "ways.json"
    one, other = Ledger(path), Ledger(path)
    one.row("a", lambda: {"qps": 0.1 + 0.2})
    other.row("b", lambda: {"qps": 2.0})
    one.load("c", lambda: {"passed": False})
    last = Ledger(path)
    assert last.rows == {"a": {"qps": 0.1 + 0.2}, "b": {"qps": 2.0}}
    assert last.loads == {"c": {"passed": False}}
    assert [p.name for p in tmp_path.iterdir()] == ["ways.json"]


def test_another_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text('{"rows": []}')
    with pytest.raises(ValueError, match=r"report\.json holds no rows"):
        Ledger(path)


ROW = {
    "deployment": "m", "dataset": "arxiv", "slo": "strict", "way": "split",
    "interconnect": "ethernet", "capacity_qps": 2.0,
}  # fmt: skip


def test_rows_of_earlier_runs_are_known_by_their_place_and_are_not_rows_of_this_one(
    tmp_path: Path,
) -> None:
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"rows": [ROW]}))
    ledger = Ledger(None, [report])
    assert ledger.earlier(("m", "arxiv", "strict", "split", "ethernet")) == ROW
    assert ledger.earlier(("m", "arxiv", "strict", "split", "nvlink")) is None
    assert not ledger.rows


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{"qps": 1}]}'])
def test_another_file_is_no_report_of_an_earlier_run(tmp_path: Path, text: str) -> None:
    report = tmp_path / "report.json"
    report.write_text(text)
    with pytest.raises(ValueError, match=r"report\.json is no report of"):
        Ledger(None, [report])
