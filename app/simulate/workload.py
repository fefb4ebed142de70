"""Workloads: who arrives when, with how long a prompt, wanting how many tokens.

Arrival processes (Poisson, gamma, bursty, diurnal, fixed, trace) and length distributions
(fixed, uniform, Zipf, log-normal, the paper's two datasets, trace) are separate and combine
freely. Everything is drawn from one seeded generator: equal arguments give equal workloads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rng = np.random.Generator
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(slots=True)
class Workload:
    """Columns of equal length, ascending in arrival.

    sessions: conversation of each request (-1: none); requests of a session share a prefix.
    shared_tokens: leading prompt tokens that repeat the session so far.
    """

    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    sessions: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    shared_tokens: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    name: str = "workload"

    def __post_init__(self) -> None:
        n = len(self.arrival_s)
        if not len(self.sessions):
            self.sessions = np.full(n, -1, np.int64)
            self.shared_tokens = np.zeros(n, np.int64)
        lengths = {
            len(c)
            for c in (self.prompt_tokens, self.output_tokens, self.sessions, self.shared_tokens)
        }
        if lengths != {n}:
            raise ValueError(f"columns of different lengths: {sorted(lengths | {n})}")
        if n and (self.prompt_tokens.min() < 1 or self.output_tokens.min() < 1):
            raise ValueError("every request needs at least one prompt and one output token")
        if n and np.any(np.diff(self.arrival_s) < 0):
            raise ValueError("arrivals must ascend")

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def qps(self) -> float:
        """Mean arrival rate, requests per second."""
        span = float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) > 1 else 0.0
        return (len(self) - 1) / span if span else 0.0

    def at_rate(self, qps: float) -> Workload:
        """The same requests in the same pattern, arriving `qps` a second on average."""
        return replace(self, arrival_s=self.arrival_s * (self.qps / qps))

    def statistics(self) -> dict[str, float]:
        """Median, P90, mean and standard deviation of prompt and output tokens."""
        result: dict[str, float] = {"num_requests": len(self), "qps": self.qps}
        for name, column in (("prompt", self.prompt_tokens), ("output", self.output_tokens)):
            result[f"{name}_median"] = float(np.median(column))
            result[f"{name}_p90"] = float(np.quantile(column, 0.9))
            result[f"{name}_mean"] = float(column.mean())
            result[f"{name}_std"] = float(column.std())
        return result


# ---- arrivals -------------------------------------------------------------------------

Arrivals = Callable[[int, Rng], Floats]


def poisson(qps: float) -> Arrivals:
    """Independent arrivals: exponential gaps."""
    return lambda n, rng: np.cumsum(rng.exponential(1.0 / qps, n))


def gamma(qps: float, cv: float = 0.5) -> Arrivals:
    """Gamma gaps with variation coefficient `cv`: steadier than Poisson below 1."""
    shape = 1.0 / (cv * cv)
    return lambda n, rng: np.cumsum(rng.gamma(shape, 1.0 / (qps * shape), n))


def fixed_interval(qps: float) -> Arrivals:
    """One request every 1/qps seconds."""
    return lambda n, rng: np.arange(1, n + 1) / qps


def bursty(qps: float, burst: float = 4.0, on_s: float = 10.0, off_s: float = 30.0) -> Arrivals:
    """On-off modulated Poisson: `burst` times the off rate while on, mean rate `qps`."""
    off_rate = qps * (on_s + off_s) / (burst * on_s + off_s)

    def draw(n: int, rng: Rng) -> Floats:
        out = np.empty(n)
        now, filled, on = 0.0, 0, False
        while filled < n:
            span = rng.exponential(on_s if on else off_s)
            count = min(int(rng.poisson(span * off_rate * (burst if on else 1.0))), n - filled)
            out[filled : filled + count] = now + np.sort(rng.uniform(0.0, span, count))
            filled, now, on = filled + count, now + span, not on
        return out

    return draw


def diurnal(qps: float, swing: float = 0.6, period_s: float = 86_400.0) -> Arrivals:
    """Poisson whose rate follows a day: qps * (1 - swing * cos(2 pi t / period)), by thinning."""
    if not 0.0 <= swing <= 1.0:
        raise ValueError(f"swing must lie in [0, 1], got {swing}")
    peak = qps * (1.0 + swing)

    def draw(n: int, rng: Rng) -> Floats:
        kept: list[Floats] = []
        now, count = 0.0, 0
        while count < n:
            times = now + np.cumsum(rng.exponential(1.0 / peak, max(1024, n)))
            rate = qps * (1.0 - swing * np.cos(2.0 * math.pi * times / period_s))
            times_kept = times[rng.uniform(0.0, peak, len(times)) < rate]
            kept.append(times_kept)
            count += len(times_kept)
            now = float(times[-1])
        return np.concatenate(kept)[:n]

    return draw


# ---- lengths --------------------------------------------------------------------------

Lengths = Callable[[int, Rng], tuple[Ints, Ints]]


def fixed_lengths(prompt: int, output: int) -> Lengths:
    return lambda n, rng: (np.full(n, prompt, np.int64), np.full(n, output, np.int64))


def uniform_lengths(low: int, high: int, prompt_per_output: float) -> Lengths:
    """Total length uniform in [low, high], split prompt : output at the given ratio."""

    def draw(n: int, rng: Rng) -> tuple[Ints, Ints]:
        return _split(rng.integers(low, high + 1, n), prompt_per_output)

    return draw


def zipf_lengths(
    low: int = 1024, high: int = 4096, theta: float = 0.6, prompt_per_output: float = 20.0
) -> Lengths:
    """Total length Zipf-distributed over [low, high] (short ones likelier), split at a ratio."""
    ranks = np.arange(1, high - low + 2, dtype=np.float64)
    weights = ranks**-theta
    cumulative = np.cumsum(weights) / weights.sum()

    def draw(n: int, rng: Rng) -> tuple[Ints, Ints]:
        totals = low + np.searchsorted(cumulative, rng.uniform(size=n))
        return _split(totals.astype(np.int64), prompt_per_output)

    return draw


def _split(totals: Ints, prompt_per_output: float) -> tuple[Ints, Ints]:
    outputs = np.maximum(1, np.rint(totals / (1.0 + prompt_per_output))).astype(np.int64)
    return np.maximum(1, totals - outputs), outputs


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """Published statistics of a dataset's column, in tokens."""

    median: float
    p90: float
    std: float


def from_statistics(prompt: LengthStatistics, output: LengthStatistics, max_total: int) -> Lengths:
    """Lengths whose median, P90 and standard deviation match published ones under a total cap.

    Each column is drawn by its quantile function: a power-law body below the median, a stretched
    tail through the P90, fitted so that the standard deviation agrees (see `_quantiles`). Prompt
    and output are independent; pairs above the cap are drawn again, as the paper filters them.
    """

    def draw(n: int, rng: Rng) -> tuple[Ints, Ints]:
        prompt_curve, output_curve = _quantiles(prompt, max_total), _quantiles(output, max_total)
        prompts, outputs = np.empty(0, np.int64), np.empty(0, np.int64)
        while len(prompts) < n:
            p = prompt_curve(rng.uniform(size=n))
            o = output_curve(rng.uniform(size=n))
            keep = p + o <= max_total
            prompts, outputs = np.append(prompts, p[keep]), np.append(outputs, o[keep])
        return prompts[:n], outputs[:n]

    return draw


@functools.lru_cache(maxsize=64)
def _quantiles(statistics: LengthStatistics, cap: int) -> Callable[[Floats], Ints]:
    """A quantile function through (1/2, median) and (0.9, P90) with the wanted deviation.

    Below the median u -> median * (2u)^a; from there a straight line to the P90, then a line to
    an end point. `a` and the end point are searched on a grid for the deviation, preferring a = 1
    (a uniform body, what both datasets resemble).
    """
    grid = (np.arange(2000) + 0.5) / 2000
    best: tuple[float, Callable[[Floats], Ints]] | None = None
    for power in (1.0, 0.8, 1.25, 0.6, 1.6, 0.4, 2.2):
        for end in np.geomspace(statistics.p90, max(statistics.p90, float(cap)), 40):
            curve = _curve(statistics, power, float(end))
            error = abs(float(curve(grid).std()) / statistics.std - 1.0) + 0.01 * abs(power - 1.0)
            if best is None or error < best[0]:
                best = (error, curve)
    if best is None:
        raise ValueError("the grid of candidate curves is empty")
    return best[1]


def _curve(statistics: LengthStatistics, power: float, end: float) -> Callable[[Floats], Ints]:
    median, p90 = statistics.median, statistics.p90

    def curve(u: Floats) -> Ints:
        body = median * (2.0 * u) ** power
        middle = median + (p90 - median) * (u - 0.5) / 0.4
        tail = p90 + (end - p90) * (u - 0.9) / 0.1
        value = np.where(u < 0.5, body, np.where(u < 0.9, middle, tail))
        return np.maximum(1, np.rint(value)).astype(np.int64)

    return curve


def sharegpt4() -> Lengths:
    """openchat_sharegpt4, from the statistics the paper publishes (section 5, Table 2).

    The output deviation is that of the released trace (266); the paper prints 101, which its own
    median and P90 exclude.
    """
    return from_statistics(
        LengthStatistics(1730, 5696, 2088), LengthStatistics(415, 834, 266), 8192
    )


def arxiv_summarization() -> Lengths:
    """arxiv_summarization, from the statistics the paper publishes (output deviation as above)."""
    return from_statistics(
        LengthStatistics(7059, 12985, 3638), LengthStatistics(208, 371, 265), 16384
    )


def scaled(lengths: Lengths, divisor: float) -> Lengths:
    """The same shape of lengths, every one divided: a workload for a smaller machine."""

    def draw(n: int, rng: Rng) -> tuple[Ints, Ints]:
        prompts, outputs = lengths(n, rng)
        return (
            np.maximum(1, np.rint(prompts / divisor)).astype(np.int64),
            np.maximum(1, np.rint(outputs / divisor)).astype(np.int64),
        )

    return draw


# ---- whole workloads ------------------------------------------------------------------


def generate(
    arrivals: Arrivals, lengths: Lengths, num_requests: int, seed: int = 0, name: str = "workload"
) -> Workload:
    """Draw a workload. Lengths and arrivals have streams of their own, so a capacity search can
    change the rate and keep the very same requests."""
    arrival_rng, length_rng = (
        np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(2)
    )
    prompts, outputs = lengths(num_requests, length_rng)
    return Workload(arrivals(num_requests, arrival_rng), prompts, outputs, name=name)


def multi_turn(
    session_qps: float,
    turns: float,
    lengths: Lengths,
    num_sessions: int,
    think_s: float = 20.0,
    max_total: int = 8192,
    seed: int = 0,
) -> Workload:
    """Conversations: each turn's prompt repeats everything said before and adds a question.

    turns: mean number of turns (geometric). think_s: mean pause between two turns (exponential),
    counted from the previous arrival. A conversation ends early at `max_total` tokens.
    """
    rng = np.random.default_rng(seed)
    starts = np.cumsum(rng.exponential(1.0 / session_qps, num_sessions))
    rows: list[tuple[float, int, int, int, int]] = []
    for session, start in enumerate(starts):
        count = int(rng.geometric(1.0 / turns))
        prompts, outputs = lengths(count, rng)
        now, history = float(start), 0
        for question, answer in zip(prompts.tolist(), outputs.tolist(), strict=True):
            if history + question + answer > max_total:
                break
            rows.append((now, history + question, answer, session, history))
            history += question + answer
            now += float(rng.exponential(think_s))
    rows.sort()
    columns = list(zip(*rows, strict=True)) if rows else [(), (), (), (), ()]
    prompts, outputs, sessions, shared = (np.array(c, np.int64) for c in columns[1:])
    arrivals = np.array(columns[0], np.float64)
    return Workload(arrivals, prompts, outputs, sessions, shared, name="multi_turn")


def concatenate(parts: Iterator[Workload] | list[Workload], name: str = "shifting") -> Workload:
    """One workload after another: traffic that shifts, say from chat to long documents."""
    pieces = list(parts)
    offset, arrivals = 0.0, []
    for piece in pieces:
        arrivals.append(piece.arrival_s + offset)
        offset = float(arrivals[-1][-1]) if len(piece) else offset
    return Workload(
        np.concatenate(arrivals),
        np.concatenate([p.prompt_tokens for p in pieces]),
        np.concatenate([p.output_tokens for p in pieces]),
        name=name,
    )


_ALIASES = {
    "arrival_s": ("arrival_s", "arrived_at", "timestamp"),
    "prompt_tokens": ("prompt_tokens", "num_prefill_tokens", "ContextTokens"),
    "output_tokens": ("output_tokens", "num_decode_tokens", "GeneratedTokens"),
}


def read_trace(path: str | Path, qps: float | None = None, seed: int = 0) -> Workload:
    """A CSV or Parquet file with prompt and output lengths, and arrival times if it has them.

    Column names of the common public traces are understood. Without arrivals (or with `qps`
    given) requests arrive as a Poisson process. Raises ValueError naming a missing column.
    """
    import pyarrow.csv
    import pyarrow.parquet

    path = Path(path)
    table: Any = (
        pyarrow.parquet.read_table(path)
        if path.suffix == ".parquet"
        else pyarrow.csv.read_csv(path)
    )
    columns: dict[str, Any] = {}
    for name, aliases in _ALIASES.items():
        found = next((a for a in aliases if a in table.column_names), None)
        if found is not None:
            columns[name] = table.column(found).to_numpy()
    for name in ("prompt_tokens", "output_tokens"):
        if name not in columns:
            raise ValueError(f"{path}: no column for {name}; it has {table.column_names}")
    prompts = np.maximum(1, columns["prompt_tokens"].astype(np.int64))
    outputs = np.maximum(1, columns["output_tokens"].astype(np.int64))
    if "arrival_s" in columns and qps is None:
        arrivals = columns["arrival_s"].astype(np.float64)
        order = np.argsort(arrivals, kind="stable")
        return Workload(arrivals[order], prompts[order], outputs[order], name=path.stem)
    if qps is None:
        raise ValueError(f"{path} has no arrival times: give a rate")
    arrivals = poisson(qps)(len(prompts), np.random.default_rng(seed))
    return Workload(arrivals, prompts, outputs, name=path.stem)
