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
