"""Reports of benchmarks: a common header, sufficient for comparison, without private data.

Every report says by which command, when, on which commit and machine, with which versions and
with which settings it was measured; what was found stands beside these keys.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import typer

_PACKAGES = ("torch", "ray", "numpy", "transformers", "triton", "flash_attn", "flash_attn_3")
_NOT_SETTINGS = {"as_json", "out", "api_key"}
_FOLDER = Path(__file__).resolve().parent


class MeasurementError(Exception):
    """Nothing was measured; the message says why."""


def make_report(
    context: typer.Context,
    results: Mapping[str, Any],
    resolved: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The common header and the results.

    resolved: settings as they took effect, where an option leaves that open (a model's name, a
    number of threads); they replace the options of the same name.
    """
    settings = {k: v for k, v in context.params.items() if k not in _NOT_SETTINGS}
    return {
        "command": context.command_path,
        "date": today(),
        "commit": commit(),
        "machine": describe_machine(),
        "versions": versions(),
        "settings": _plain({**settings, **(resolved or {})}),
        **_plain(results),
    }


def publish(report: Mapping[str, Any], as_json: bool, out: Path | None) -> None:
    """Print the report if asked to, and write it where asked to."""
    text = json.dumps(report, indent=2, allow_nan=False)
    if as_json:
        typer.echo(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")


def today() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")


def commit(folder: Path = _FOLDER) -> str:
    """The commit of the checkout that holds a folder, with "-dirty" where a tracked file differs
    from it; "unknown" outside a checkout."""
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=folder,
            capture_output=True,
            text=True,
        )
    except OSError:  # no git here
        return "unknown"
    return answer.stdout.strip() or "unknown"


def describe_machine() -> dict[str, Any]:
    """Processor, cores and memory; the GPU too, where the benchmark uses torch and there is one."""
    machine = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        machine |= {
            "gpu": properties.name,
            "gpu_memory_gib": round(properties.total_memory / 2**30),
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    return machine


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that affect speed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _plain(value: Any) -> Any:
    """The value in JSON's types: a path becomes a string, NaN and infinity become null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
