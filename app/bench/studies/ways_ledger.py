"""What `legato bench ways` has found so far, in a file if there is one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Found = dict[str, Any]


class Ledger:
    """Rows of the report, and the loads that were simulated on the way to them.

    Each is written when it is found: a search that was interrupted repeats no load, and rows that
    several commands have found become one report. Commands that run at the same time keep each
    other's entries, unless both write in the same moment.
    """

    def __init__(self, path: Path | None = None, reports: Iterable[Path] = ()) -> None:
        """reports: of earlier runs, near whose capacities to begin.

        Raises ValueError if a file holds something else.
        """
        self.path = path
        self._earlier: dict[tuple[str, ...], Found] = {}
        for report in reports:
            self._earlier |= _rows_of(report)
        self.rows: dict[str, Found] = {}
        self.loads: dict[str, Found] = {}
        self._read()

    def earlier(self, place: tuple[str, ...]) -> Found | None:
        """The row of an earlier run that found a capacity. place: as of `place_of`."""
        return self._earlier.get(place)

    def row(self, key: str, find: Callable[[], Found]) -> Found:
        """The row of this name, searched if it is not known."""
        return self._known(self.rows, key, find)

    def load(self, key: str, simulate: Callable[[], Found]) -> Found:
        """What was seen under the load of this name, simulated if it is not known."""
        return self._known(self.loads, key, simulate)

    def _known(self, kind: dict[str, Found], key: str, find: Callable[[], Found]) -> Found:
        if key not in kind:
            kind[key] = find()
            self._write()
        return kind[key]

    def _read(self) -> None:
        if self.path is None or not self.path.exists():
            return
        there = json.loads(self.path.read_text("utf-8"))
        if not isinstance(there, dict) or set(there) != {"rows", "loads"}:
            raise ValueError(f"{self.path} holds no rows of `legato bench ways`")
        for mine, theirs in ((self.rows, there["rows"]), (self.loads, there["loads"])):
            mine.update({key: found for key, found in theirs.items() if key not in mine})

    def _write(self) -> None:
        if self.path is None:
            return
        self._read()  # what others have added
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"rows": self.rows, "loads": self.loads}, indent=1, allow_nan=False)
        part = self.path.with_suffix(f"{self.path.suffix}.part")
        part.write_text(text + "\n", "utf-8")
        part.replace(self.path)


def place_of(row: Found) -> tuple[str, ...]:
    """Deployment, dataset, objective, way and link."""
    return tuple(row[part] for part in ("deployment", "dataset", "slo", "way", "interconnect"))


def _rows_of(report: Path) -> dict[tuple[str, ...], Found]:
    try:
        rows = json.loads(report.read_text("utf-8"))["rows"]
        return {place_of(row): row for row in rows if row["capacity_qps"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{report} is no report of `legato bench ways`") from error
