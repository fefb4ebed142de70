"""Every committed report is in the table that names its command, and carries what it needs."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "configs/hardware/reports"
REPORTS = sorted(FOLDER.glob("*.json"))
PATTERNS = re.findall(r"`(\*-[^`]*\.json)`", (FOLDER / "README.md").read_text())


def matches(report: Path, pattern: str) -> bool:
    return fnmatch(report.name.replace("-amx", ""), pattern)


def test_every_report_has_a_row() -> None:
    assert REPORTS
    assert [r.name for r in REPORTS if not any(matches(r, p) for p in PATTERNS)] == []


def test_every_row_has_a_report() -> None:
    assert [p for p in PATTERNS if not any(matches(r, p) for r in REPORTS)] == []


def test_a_report_says_how_it_was_made() -> None:
    needed = {"command", "settings", "machine", "commit"}
    found = [report for report in REPORTS if report.name >= "2026-11-23"]
    assert [r.name for r in found if needed - set(json.loads(r.read_text()))] == []
