"""Workloads: when each request arrives, with how long a prompt, for how many output tokens.

Arrival processes (`arrivals`) and length distributions (`lengths`) are separate and combine
freely; recorded ones are read by `traces`. Everything is drawn from one seeded generator: equal
arguments give equal workloads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from app.simulate.workload.arguments import positive, within
from app.simulate.workload.arrivals import Arrivals
from app.simulate.workload.lengths import Lengths

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(slots=True)
class Workload:
    """Columns of equal length, ascending in arrival.

    sessions: conversation of each request (-1: none); requests of a session share a prefix.
    shared_tokens: leading prompt tokens that repeat the session so far.
    branching: what follows them is each request's own (questions about one document), where a
        conversation's next turn repeats it.
    """

    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    sessions: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    shared_tokens: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    name: str = "workload"
    branching: bool = False

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
    positive("session_qps", session_qps)
    within("turns", turns, 1.0, 1e6)
    within("think_s", think_s, 0.0, 1e9)
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


def about_documents(
    arrivals: Arrivals,
    lengths: Lengths,
    num_documents: int,
    num_requests: int,
    question_tokens: int = 64,
    theta: float = 0.8,
    seed: int = 0,
) -> Workload:
    """Questions about documents: a prompt is a document followed by its own question.

    lengths: of the documents and of the answers. theta: how uneven the documents' popularity is
    (the n-th is asked for in proportion to n ** -theta).
    """
    within("documents", num_documents, 1, 1e7)
    within("question_tokens", question_tokens, 0, 1e7)
    within("theta", theta, 0.0, 100.0)
    arrival_rng, length_rng, choice_rng = (
        np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(3)
    )
    documents, _ = lengths(num_documents, length_rng)
    _, outputs = lengths(num_requests, length_rng)
    weights = np.arange(1, num_documents + 1, dtype=np.float64) ** -theta
    chosen = choice_rng.choice(num_documents, num_requests, p=weights / weights.sum())
    questions = 1 + choice_rng.poisson(question_tokens, num_requests)
    return Workload(
        arrivals(num_requests, arrival_rng),
        documents[chosen] + questions,
        outputs,
        chosen.astype(np.int64),
        documents[chosen],
        name="documents",
        branching=True,
    )


def concatenate(parts: Iterable[Workload], name: str = "shifting") -> Workload:
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
