"""One report of a GPU bench: JSON for reading, Parquet for comparing many."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from app.bench.machine import describe


@dataclass(slots=True)
class Report:
    """sections: rows by name ("checks", "tokens", "kernels", "steps", "capacity")."""

    settings: Mapping[str, Any]
    sections: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def add(self, section: str, row: Any) -> None:
        """A dataclass row, with those of its properties that judge it."""
        fields = asdict(row)
        for name in ("passed", "efficiency", "ratio", "met"):
            if hasattr(row, name):
                fields[name] = getattr(row, name)
        self.sections.setdefault(section, []).append(fields)

    def to_dict(self) -> dict[str, Any]:
        return {
            "machine": {**describe(), **describe_gpu()},
            "settings": dict(self.settings),
            **self.extra,
            **self.sections,
        }

    @property
    def failures(self) -> list[str]:
        """Checks that did not pass, by name. Missed targets are not failures."""
        checks = [r["name"] for r in self.sections.get("checks", ()) if not r["passed"]]
        tokens = [
            f"tokens of {r['model']} on {r['backend']} in {r['dtype']}"
            for r in self.sections.get("tokens", ())
            if not r["passed"]
        ]
        return checks + tokens


def describe_gpu() -> dict[str, Any]:
    """Device, its memory, and the libraries that matter; nothing of the host but that."""
    if not torch.cuda.is_available():
        return {"gpu": None}
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_memory_gib": round(properties.total_memory / 2**30),
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "flash_attn": _version("flash_attn"),
    }


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write(report: Report, folder: Path, name: str) -> Path:
    """`name`.json and `name`.parquet in `folder`; returns the former.

    The Parquet file has one row per measurement: section, then its fields as JSON text beside the
    columns every section may have (case, backend, value).
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    content = report.to_dict()
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content, indent=2) + "\n")
    rows = [
        {"section": section, "label": _label(row), "fields": json.dumps(row)}
        for section, entries in report.sections.items()
        for row in entries
    ]
    columns: dict[str, Sequence[Any]] = {
        key: [row[key] for row in rows] for key in ("section", "label", "fields")
    }
    table = pa.table({key: pa.array(values, pa.string()) for key, values in columns.items()})
    machine = json.dumps({"machine": content["machine"], "settings": content["settings"]})
    pq.write_table(table.replace_schema_metadata({"legato": machine}), folder / f"{name}.parquet")
    return path


def _label(row: Mapping[str, Any]) -> str:
    known = ("model", "backend", "kernel", "policy", "case", "name")
    return ", ".join(str(row[key]) for key in known if key in row)
