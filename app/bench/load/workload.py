"""The requests of a run: Poisson arrivals, lengths of real traffic, a few long prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from app.bench.load.client import Job
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.lengths import (
    Lengths,
    arxiv_summarization,
    fixed_lengths,
    scaled,
    sharegpt4,
)
from app.simulate.workload.requests import Workload, generate
from app.simulate.workload.specs import names_file, parse_lengths

LengthsOption = Annotated[
    str,
    typer.Option(
        help="sharegpt, arxiv or a CSV, Parquet or YAML file, each with /DIVISOR; or PROMPTxOUTPUT."
    ),
]


def lengths_of(name: str) -> Lengths:
    """Lengths by name. Raises typer.BadParameter for an unknown name or an unreadable file."""
    if names_file(name):
        try:
            return parse_lengths(name)
        except (OSError, ValueError) as error:
            raise typer.BadParameter(f"{name!r}: {error}") from error
    kind, _, divisor = name.partition("/")
    if kind in ("sharegpt", "sharegpt4", "arxiv"):
        lengths = arxiv_summarization() if kind == "arxiv" else sharegpt4()
        return scaled(lengths, _divisor(name, divisor)) if divisor else lengths
    prompt, _, output = name.partition("x")
    if prompt.isdigit() and output.isdigit() and int(prompt) and int(output):
        return fixed_lengths(int(prompt), int(output))
    raise typer.BadParameter(f"{name!r}: use sharegpt, arxiv, sharegpt/8 or 512x64")


def _divisor(name: str, text: str) -> float:
    try:
        divisor = float(text)
    except ValueError:
        divisor = 0.0
    if not 0.0 < divisor < math.inf:
        raise typer.BadParameter(f"{name!r}: the divisor must be a positive number")
    return divisor


def jobs_of(workload: Workload) -> list[Job]:
    return [
        Job(float(a), int(p), int(o))
        for a, p, o in zip(
            workload.arrival_s, workload.prompt_tokens, workload.output_tokens, strict=True
        )
    ]


@dataclass(frozen=True, slots=True)
class Load:
    """Poisson arrivals over `seconds`, and `num_long` prompts of `long_tokens` spread evenly.

    qps: of the arrivals as they are, not of the process that draws them: eleven of a process of one
    a second take seven to sixteen seconds.
    """

    lengths: str = "sharegpt/8"
    qps: float = 1.2
    seconds: float = 40.0
    num_long: int = 0
    long_tokens: int = 3000
    seed: int = 0

    def jobs(self) -> list[Job]:
        """The requests in order of arrival, determined by the load. The first comes at once: drawn
        like the others and stretched with them, its time would shift a slow load beyond its end."""
        count = max(2, math.ceil(self.qps * self.seconds - 1e-9))
        workload = generate(poisson(self.qps), lengths_of(self.lengths), count, seed=self.seed)
        workload = workload.at_rate(self.qps)
        jobs = jobs_of(replace(workload, arrival_s=workload.arrival_s - workload.arrival_s[0]))
        gap_s = self.seconds / (self.num_long + 1)
        jobs += [Job((k + 1) * gap_s, self.long_tokens, 8) for k in range(self.num_long)]
        return sorted(jobs, key=lambda job: job.arrival_s)
