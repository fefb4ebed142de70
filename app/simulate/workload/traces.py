"""Trace files: requests with their lengths, and their arrivals if they were kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from app.simulate.workload.arrivals import Arrivals, Floats
from app.simulate.workload.lengths import Ints, Lengths, Rng
from app.simulate.workload.requests import Workload

SUFFIXES = (".csv", ".parquet")
_ALIASES = {
    "arrival_s": ("arrival_s", "arrived_at", "timestamp", "TIMESTAMP", "start_s"),
    "prompt_tokens": ("prompt_tokens", "num_prefill_tokens", "ContextTokens", "num_prompt_tokens"),
    "output_tokens": ("output_tokens", "num_decode_tokens", "GeneratedTokens", "num_output_tokens"),
}


def read_trace(path: str | Path, arrivals: Arrivals | None = None, seed: int = 0) -> Workload:
    """A CSV or Parquet file with prompt and output lengths, and arrival times if it has them.

    Column names of the common public traces are understood. Arrivals are seconds, or dates, which
    become seconds since the first. arrivals: in place of the file's.
    Raises ValueError naming a column that is missing or holds something else.
    """
    path = Path(path)
    columns = _read_columns(path)
    prompts, outputs = columns["prompt_tokens"], columns["output_tokens"]
    if arrivals is not None:
        times = arrivals(len(prompts), np.random.default_rng(seed))
        return Workload(times, prompts, outputs, name=path.stem)
    if "arrival_s" not in columns:
        raise ValueError(f"{path} has no arrival times: give a rate")
    times = columns["arrival_s"]
    if times.dtype.kind == "M":
        times = (times - times.min()) / np.timedelta64(1, "s")
    times = _numbers(path, "arrival_s", times)
    order = np.argsort(times, kind="stable")
    return Workload(times[order], prompts[order], outputs[order], name=path.stem)


def trace_lengths(path: str | Path) -> Lengths:
    """Lengths drawn from the file's requests, with replacement: prompt and output stay a pair.

    Raises OSError for no file, ValueError naming a missing column.
    """
    columns = _read_columns(Path(path))
    return lengths_among(columns["prompt_tokens"], columns["output_tokens"])


def lengths_among(prompts: Ints, outputs: Ints) -> Lengths:
    """Draws among these pairs, with replacement."""

    def draw(n: int, rng: Rng) -> tuple[Ints, Ints]:
        rows = rng.integers(0, len(prompts), n)
        return prompts[rows], outputs[rows]

    return draw


def _read_columns(path: Path) -> dict[str, Any]:
    """Columns by name: lengths as integers of at least 1, and arrival_s as it is, if present."""
    import pyarrow.csv
    import pyarrow.parquet

    read = pyarrow.parquet.read_table if path.suffix == ".parquet" else pyarrow.csv.read_csv
    try:
        with path.open("rb") as file:
            table: Any = read(file)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not table.num_rows:
        raise ValueError(f"{path} holds no request")
    columns: dict[str, Any] = {}
    for name, aliases in _ALIASES.items():
        found = next((a for a in aliases if a in table.column_names), None)
        if found is not None:
            columns[name] = table.column(found).to_numpy()
    for name in ("prompt_tokens", "output_tokens"):
        if name not in columns:
            raise ValueError(f"{path}: no column for {name}; it has {table.column_names}")
        columns[name] = np.maximum(1, _numbers(path, name, columns[name]).astype(np.int64))
    return columns


def _numbers(path: Path, name: str, values: Any) -> Floats:
    if values.dtype.kind not in "iuf" or not np.all(np.isfinite(values)):
        raise ValueError(f"{path}: the column for {name} does not hold a number in every row")
    return np.asarray(values, np.float64)
