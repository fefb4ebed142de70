"""What a GPU bench found, in sections of rows; as Parquet too, for comparing many reports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class GpuSections:
    """rows: by section ("checks", "tokens", "kernels", "steps", "capacity")."""

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
    known = ("model", "backend", "kernel", "policy", "case", "name")
    return ", ".join(str(row[key]) for key in known if key in row)
