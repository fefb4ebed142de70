"""Results of a GPU bench in sections of rows, also as Parquet to compare many reports."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import typer

from app.bench.report import make_report, publish
from app.bench.terminal import console

_WRITE_EVERY_S = 5.0


@dataclass(slots=True)
class GpuSections:
    """rows: by section ("anatomy", "checks", ..., "peers")."""

    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, section: str, row: Any) -> None:
        """A dataclass row, with those of its properties that judge it."""
        fields = asdict(row)
        for name in ("passed", "efficiency", "ratio", "met"):
            if hasattr(row, name):
                fields[name] = getattr(row, name)
        self.rows.setdefault(section, []).append(fields)

    @property
    def failures(self) -> list[str]:
        """Checks that did not pass, by name. Missed targets are not failures."""
        checks = [r["name"] for r in self.rows.get("checks", ()) if not r["passed"]]
        tokens = [
            f"tokens of {r['model']} on {r['backend']} in {r['dtype']}"
            for r in self.rows.get("tokens", ())
            if not r["passed"]
        ]
        return checks + tokens


class GpuReport:
    """The results so far, and their files, which are complete at any moment.

    found: results that are not rows. errors, seconds: by the title of what was done; left_out: what
    there was no time for.
    """

    def __init__(
        self, context: typer.Context, resolved: Mapping[str, Any], path: Path | None
    ) -> None:
        self._context = context
        self._resolved = resolved
        self._path = path
        self._written_s = 0.0
        self.sections = GpuSections()
        self.found: dict[str, Any] = {}
        self.errors: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.left_out: list[str] = []

    def add(self, section: str, row: Any) -> None:
        """Note a row, and now and then write what there is: a section may take minutes."""
        self.sections.add(section, row)
        if time.monotonic() - self._written_s > _WRITE_EVERY_S:
            self.write()

    def write(self) -> None:
        """Replace the files by what has been found so far."""
        if self._path is None:
            return
        report, partial = self._report(), self._path.with_suffix(".partial")
        publish(report, False, partial)
        partial.replace(self._path)
        write_parquet(report, self.sections, self._path.with_suffix(".parquet"))
        self._written_s = time.monotonic()

    def publish(self, as_json: bool) -> None:
        """Write the files, and print the report if asked to."""
        self.write()
        publish(self._report(), as_json, None)
        if self._path is not None:
            console.print(f"report: {self._path}")

    @property
    def troubles(self) -> list[str]:
        """Failed checks and raised errors, in words."""
        return self.sections.failures + [f"{title}: {e}" for title, e in self.errors.items()]

    def _report(self) -> dict[str, Any]:
        ends = {"seconds": self.seconds, "errors": self.errors, "left_out": self.left_out}
        results = {**self.found, **self.sections.rows, **ends}
        return make_report(self._context, results, self._resolved)


def write_parquet(report: Mapping[str, Any], sections: GpuSections, path: Path) -> None:
    """One row per measurement: its section, a label, and its fields as JSON text.

    report: its other keys (machine, versions, settings, ...) become the table's metadata.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"section": section, "label": _label(row), "fields": json.dumps(row)}
        for section, entries in sections.rows.items()
        for row in entries
    ]
    columns = {key: [row[key] for row in rows] for key in ("section", "label", "fields")}
    table = pa.table({key: pa.array(values, pa.string()) for key, values in columns.items()})
    about = json.dumps({key: value for key, value in report.items() if key not in sections.rows})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata({"legato": about}), path)


def _label(row: Mapping[str, Any]) -> str:
    known = ("model", "backend", "kernel", "policy", "case", "name", "server")
    return ", ".join(str(row[key]) for key in known if key in row)
