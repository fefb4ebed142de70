"""Workloads by name, as the command line and YAML files write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from app.simulate.workload.arrivals import Arrivals, bursty, diurnal, fixed_interval, gamma, poisson
from app.simulate.workload.lengths import (
    Lengths,
    arxiv_summarization,
    fixed_lengths,
    mixed,
    scaled,
    sharegpt4,
    uniform_lengths,
    zipf_lengths,
)
from app.simulate.workload.requests import (
    Workload,
    about_documents,
    concatenate,
    generate,
    multi_turn,
)
from app.simulate.workload.traces import SUFFIXES, read_trace, trace_lengths

_LENGTHS: dict[str, Callable[..., Lengths]] = {
    "sharegpt4": sharegpt4,
    "arxiv": arxiv_summarization,
    "mixed": lambda share=0.5: mixed(sharegpt4(), arxiv_summarization(), share),
    "fixed": lambda prompt, output: fixed_lengths(int(prompt), int(output)),
    "uniform": lambda low, high, ratio: uniform_lengths(int(low), int(high), ratio),
    "zipf": lambda low=1024.0, high=4096.0, theta=0.6, ratio=20.0: zipf_lengths(
        int(low), int(high), theta, ratio
    ),
}

_ARRIVALS: dict[str, Callable[..., Arrivals]] = {
    "poisson": poisson,
    "gamma": gamma,
    "bursty": bursty,
    "diurnal": diurnal,
    "fixed": fixed_interval,
}


def parse_lengths(text: str) -> Lengths:
    """`name`, `name:a,b,c` or a CSV or Parquet trace; a final `/8` divides lengths by eight.

    Raises ValueError naming the distributions there are, or the arguments one takes; OSError for
    a trace that is not there.
    """
    body, divisor = text, ""
    if not text.endswith(SUFFIXES):
        head, slash, tail = text.rpartition("/")
        if slash and (head.endswith(SUFFIXES) or "/" not in head):
            body, divisor = head, tail
    if body.endswith(SUFFIXES):
        lengths = trace_lengths(body)
    else:
        name, arguments = _split(body)
        lengths = _call(_LENGTHS, "length distribution", name, arguments)
    if not divisor:
        return lengths
    try:
        return scaled(lengths, float(divisor))
    except ValueError as error:
        raise ValueError(f"{text!r}: a number must follow '/'") from error


def names_trace(text: str) -> bool:
    """Whether `parse_lengths` would read a file."""
    return text.endswith(SUFFIXES) or text.rpartition("/")[0].endswith(SUFFIXES)


def parse_arrivals(text: str, qps: float) -> Arrivals:
    """`name` or `name:a,b`; the arguments after the rate. Raises ValueError as above."""
    name, arguments = _split(text)
    return _call(_ARRIVALS, "arrival process", name, [qps, *arguments])


def _split(text: str) -> tuple[str, list[float]]:
    name, _, rest = text.partition(":")
    try:
        return name, [float(part) for part in rest.split(",") if part]
    except ValueError as error:
        raise ValueError(f"{text!r}: arguments behind ':' are numbers") from error


def _call(table: Mapping[str, Callable[..., Any]], kind: str, name: str, arguments: Any) -> Any:
    if name not in table:
        raise ValueError(f"unknown {kind} {name!r}; known: {', '.join(sorted(table))}")
    try:
        return table[name](*arguments)
    except TypeError as error:
        raise ValueError(f"{kind} {name!r}: {error}") from error


def load_workload(path: str | Path, seed: int = 0) -> Workload:
    """A YAML file of `configs/workloads`. Raises ValueError naming a wrong or missing key."""
    import yaml

    data = yaml.safe_load(Path(path).read_text("utf-8"))
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected a mapping")
    return build_workload(data, seed)


def build_workload(data: Mapping[str, Any], seed: int = 0) -> Workload:
    """A workload from plain data: `phases` (a list of workloads), `trace`, `sessions`,
    `documents`, or `lengths` + `arrivals` + `qps` + `requests`."""
    values = dict(data)
    name = str(values.pop("name", "workload"))
    values.pop("description", None)
    try:
        if "phases" in values:
            parts = [build_workload(p, seed + i) for i, p in enumerate(values.pop("phases"))]
            built = concatenate(parts, name)
        elif "trace" in values:
            built = read_trace(values.pop("trace"), values.pop("qps", None), seed)
        elif "sessions" in values:
            built = multi_turn(
                float(values.pop("session_qps")),
                float(values.pop("turns")),
                parse_lengths(values.pop("lengths")),
                int(values.pop("sessions")),
                float(values.pop("think_s", 20.0)),
                int(values.pop("max_total", 8192)),
                seed,
            )
        elif "documents" in values:
            built = about_documents(
                parse_arrivals(values.pop("arrivals", "poisson"), float(values.pop("qps"))),
                parse_lengths(values.pop("lengths")),
                int(values.pop("documents")),
                int(values.pop("requests")),
                int(values.pop("question_tokens", 64)),
                float(values.pop("theta", 0.8)),
                seed,
            )
        else:
            arrivals = parse_arrivals(values.pop("arrivals", "poisson"), float(values.pop("qps")))
            lengths = parse_lengths(values.pop("lengths"))
            built = generate(arrivals, lengths, int(values.pop("requests")), seed, name)
    except KeyError as error:
        raise ValueError(f"workload {name!r}: missing key {error}") from error
    if values:
        raise ValueError(f"workload {name!r}: unknown keys {', '.join(sorted(values))}")
    return built
