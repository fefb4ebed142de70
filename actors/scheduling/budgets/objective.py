"""What an objective allows: how long the next token may take, and how much of that to plan for.

A token that comes early buys time for later ones, as a deadline schedule allows (token k of a
stream is due k objectives after the first). Left alone that bank would grow without bound and a
stream far ahead could then be stalled for seconds, which is what the objective forbids; so no
gap may exceed `smoothness` objectives. At smoothness 1 every single gap keeps the objective.
"""

from __future__ import annotations

from dataclasses import dataclass


def due_after(due_s: float, now_s: float, tbt_s: float, smoothness: float) -> float:
    """When a stream's next token is due; the last was due at `due_s` and left at `now_s`.

    Never later than smoothness * tbt_s from now; never earlier than tbt_s from now unless this
    token was late, in which case the schedule restarts behind it: one stall is not paid for twice.
    """
    promised = (due_s if due_s > now_s else now_s) + tbt_s
    bound = now_s + smoothness * tbt_s
    return promised if promised < bound else bound


@dataclass(slots=True)
class KeptShare:
    """The share of an objective to plan for, so that at most `allowed` of the steps miss it.

    Bounds from predictions know neither what they were not shown (another process on the core, a
    page fault) nor how such delays add up. A miss lowers the share by `rate`; steps that keep
    the objective raise it so slowly that one miss in 1 / `allowed` steps leaves it where it is.
    It begins below one: trust is earned, seven hundred steps for the first tenth.
    """

    allowed: float
    rate: float = 0.02
    least: float = 0.7
    value: float = 0.9

    def note(self, kept: bool) -> None:
        if kept:
            self.value = min(1.0, self.value * (1.0 + self.rate * self.allowed))
        else:
            self.value = max(self.least, self.value * (1.0 - self.rate))
