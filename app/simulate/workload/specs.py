"""Workloads by name, as the command line and YAML files write them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from app.paths import locate
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
from app.simulate.workload.traces import SUFFIXES, lengths_among, read_trace, trace_lengths

_YAML = (".yaml", ".yml")
_FILES = (*SUFFIXES, *_YAML)
_BEING_READ: list[Path] = []

_LENGTHS: dict[str, Callable[..., Lengths]] = {
    "sharegpt4": sharegpt4,
    "sharegpt": sharegpt4,  # as the benchmarks of a running server call it
    "arxiv": arxiv_summarization,
    "mixed": lambda share=0.5: mixed(sharegpt4(), arxiv_summarization(), share),
    "fixed": fixed_lengths,
    "uniform": uniform_lengths,
    "zipf": zipf_lengths,
}

_ARRIVALS: dict[str, Callable[..., Arrivals]] = {
    "poisson": poisson,
    "gamma": gamma,
    "bursty": bursty,
    "diurnal": diurnal,
    "fixed": fixed_interval,
}


def parse_lengths(text: str) -> Lengths:
    """`name`, `name:a,b,c` or a file; a final `/8` divides lengths by eight.

    Of a file (a CSV or Parquet trace, a YAML workload) lengths are drawn from its requests. Raises
    ValueError naming the distributions there are, the arguments one takes or what is wrong in a
    file; OSError for a file that is not there.
    """
    body, divisor = _undivided(text)
    if body.endswith(SUFFIXES):
        lengths = trace_lengths(locate(body))
    elif body.endswith(_YAML):
        own = load_workload(body)
        lengths = lengths_among(own.prompt_tokens, own.output_tokens)
    else:
        name, arguments = _split(body)
        lengths = _call(_LENGTHS, "length distribution", name, arguments)
    if not divisor:
        return lengths
    try:
        number = float(divisor)
    except ValueError as error:
        raise ValueError(f"{text!r}: a number must follow '/'") from error
    try:
        return scaled(lengths, number)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from error


def _undivided(text: str) -> tuple[str, str]:
    """What a final `/8` divides, and the divisor, if there is one."""
    if not text.endswith(_FILES):
        head, slash, tail = text.rpartition("/")
        if slash and (head.endswith(_FILES) or "/" not in head):
            return head, tail
    return text, ""


def names_file(text: str) -> bool:
    """Whether `parse_lengths` would read a file."""
    return _undivided(text)[0].endswith(_FILES)


def names_yaml(text: str) -> bool:
    """Whether the text names a YAML workload."""
    return text.endswith(_YAML)


def digest_of(text: str) -> str:
    """Of the content of the file that `parse_lengths` would read; "" for lengths in no file. A YAML
    workload may name other files, so its requests count. Raises as `parse_lengths`."""
    body, _ = _undivided(text)
    if body.endswith(_YAML):
        own = load_workload(body)
        content = own.prompt_tokens.tobytes() + own.output_tokens.tobytes()
    elif body.endswith(SUFFIXES):
        content = locate(body).read_bytes()
    else:
        return ""
    return hashlib.sha256(content).hexdigest()[:16]


def read_file(text: str, seed: int = 0) -> Workload:
    """A workload file's requests, as they arrive in it. Raises as `parse_lengths`."""
    return load_workload(text, seed) if names_yaml(text) else read_trace(locate(text))


class Traffic(NamedTuple):
    """What a search serves at every load. arrivals: a rate -> when requests come."""

    lengths: Lengths
    arrivals: Callable[[float], Arrivals]
    num_requests: int
    seed: int

    def at(self, qps: float) -> Workload:
        """The same requests at every rate, near which they arrive."""
        return generate(self.arrivals(qps), self.lengths, self.num_requests, self.seed)


class TrafficSpec(NamedTuple):
    """Traffic by names, which other processes can read.

    arrivals: a process, or `trace`: a file's own pattern, stretched to each rate.
    """

    workload: str
    arrivals: str = "poisson"
    num_requests: int = 512
    seed: int = 0

    def read(self) -> Traffic:
        """Raises as `parse_lengths`."""
        if self.arrivals == "trace":
            if not self.workload.endswith(_FILES):
                raise ValueError(f"arrivals trace: the workload {self.workload!r} is not a file")
            own = read_file(self.workload, self.seed)
            lengths, times = (own.prompt_tokens, own.output_tokens), own.arrival_s
            return Traffic(
                lambda n, rng: lengths, lambda qps: lambda n, rng: times, len(own), self.seed
            )
        parse_arrivals(self.arrivals, 1.0)  # a wrong name is refused before anything is simulated
        return Traffic(
            parse_lengths(self.workload),
            lambda qps: parse_arrivals(self.arrivals, qps),
            self.num_requests,
            self.seed,
        )


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
    except (TypeError, ValueError) as error:
        raise ValueError(f"{kind} {name!r}: {error}") from error


def load_workload(path: str | Path, seed: int = 0) -> Workload:
    """A YAML file as in `configs/workloads`.

    Raises OSError for no file, ValueError naming the file and a wrong or missing key.
    """
    import yaml

    text, file = locate(path).read_text("utf-8"), locate(path).resolve()
    if file in _BEING_READ:
        raise ValueError(f"{path} draws its lengths from itself")
    _BEING_READ.append(file)
    try:
        data = yaml.safe_load(text)
        if not isinstance(data, dict):
            raise ValueError("expected a mapping of keys to values")
        workload = build_workload(data, seed)
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{path}: {error}") from error
    finally:
        _BEING_READ.remove(file)
    if not len(workload):
        raise ValueError(f"{path} holds no request")
    return workload


def build_workload(data: Mapping[str, Any], seed: int = 0) -> Workload:
    """A workload from plain data: `phases` (a list of workloads), `trace`, `sessions`,
    `documents`, or `lengths` + `arrivals` + `qps` + `requests`."""
    values = dict(data)
    name = str(values.pop("name", "workload"))
    values.pop("description", None)
    try:
        if "phases" in values:
            phases = values.pop("phases")
            if not isinstance(phases, list) or not phases:
                raise ValueError(f"workload {name!r}: phases are a list of workloads")
            parts = [build_workload(phase, seed + i) for i, phase in enumerate(phases)]
            built = concatenate(parts, name)
        elif "trace" in values:
            qps = values.pop("qps", None)
            arrivals = None if qps is None else poisson(float(qps))
            built = read_trace(locate(values.pop("trace")), arrivals, seed)
        elif "sessions" in values:
            built = multi_turn(
                float(values.pop("session_qps")),
                float(values.pop("turns")),
                parse_lengths(str(values.pop("lengths"))),
                int(values.pop("sessions")),
                float(values.pop("think_s", 20.0)),
                int(values.pop("max_total", 8192)),
                seed,
            )
        elif "documents" in values:
            built = about_documents(
                parse_arrivals(str(values.pop("arrivals", "poisson")), float(values.pop("qps"))),
                parse_lengths(str(values.pop("lengths"))),
                int(values.pop("documents")),
                int(values.pop("requests")),
                int(values.pop("question_tokens", 64)),
                float(values.pop("theta", 0.8)),
                seed,
            )
        else:
            arrivals = parse_arrivals(
                str(values.pop("arrivals", "poisson")), float(values.pop("qps"))
            )
            lengths = parse_lengths(str(values.pop("lengths")))
            built = generate(arrivals, lengths, int(values.pop("requests")), seed, name)
    except KeyError as error:
        raise ValueError(f"workload {name!r}: missing key {error}") from error
    if values:
        raise ValueError(f"workload {name!r}: unknown keys {', '.join(sorted(values))}")
    return built
