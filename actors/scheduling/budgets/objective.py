"""Slack: how long the next token of a decode may still take.

A token that comes early buys time for later ones, as a deadline schedule allows (token k of a
stream is due k objectives after the first). Left alone that bank would grow without bound and a
stream far ahead could then be stalled for seconds, which is what the objective forbids; so no
gap may exceed `smoothness` objectives. At smoothness 1 every single gap keeps the objective.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TokenClock:
    """The due time of one stream's next token.

    Invariants: due_s <= last_s + smoothness * tbt_s; due_s >= last_s + tbt_s unless a token was
    late, in which case the schedule restarts behind it (one stall is not paid for by the rest).
    """

    tbt_s: float  # the objective
    last_s: float  # when the last token left
    due_s: float  # when the next one is promised
    smoothness: float = 1.0  # longest gap allowed, in objectives

    @classmethod
    def start(cls, now_s: float, tbt_s: float, smoothness: float = 1.0) -> TokenClock:
        """The clock of a stream whose first token leaves now. Raises ValueError on bad bounds."""
        if tbt_s <= 0 or smoothness < 1.0:
            raise ValueError(f"need tbt_s > 0 and smoothness >= 1, got {tbt_s}, {smoothness}")
        return cls(tbt_s, now_s, now_s + tbt_s, smoothness)

    def token(self, now_s: float) -> None:
        """A token left now."""
        promised = max(self.due_s, now_s) + self.tbt_s
        self.due_s = min(promised, now_s + self.smoothness * self.tbt_s)
        self.last_s = now_s

    def slack_s(self, now_s: float) -> float:
        """Seconds from now until the next token is due; negative when late."""
        return self.due_s - now_s


def due_after(due_s: float, now_s: float, tbt_s: float, smoothness: float) -> float:
    """`TokenClock.token` on bare numbers, for loops over a whole batch."""
    promised = (due_s if due_s > now_s else now_s) + tbt_s
    bound = now_s + smoothness * tbt_s
    return promised if promised < bound else bound


# ==== merged from actors/scheduling/feedback

"""Planning for a little less than was promised, as long as promises are being broken."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class KeptShare:
    """The share of an objective to plan for, so that at most `allowed` of the steps miss it.

    Bounds from predictions know neither what they were not shown (another process on the core, a
    page fault) nor how such delays add up. A miss lowers the share by `rate`; steps that keep
    the objective raise it so slowly that one miss in 1 / `allowed` steps leaves it where it is.
    It begins below one: trust is earned, seven hundred steps for the first tenth.
    """

    allowed: float = 0.0075  # of the hundredth that a P99 objective forgives
    rate: float = 0.02
    least: float = 0.7
    value: float = 0.9

    def note(self, kept: bool) -> None:
        if kept:
            self.value = min(1.0, self.value * (1.0 + self.rate * self.allowed))
        else:
            self.value = max(self.least, self.value * (1.0 - self.rate))
