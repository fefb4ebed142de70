"""What a policy is."""

from __future__ import annotations

from typing import Protocol

from actors.scheduling.step import StepBuilder


class Policy(Protocol):
    """Adds slices to the step through the builder; deterministic, and keeps no request.

    order: the waiting order it was described with. reserve: KV for the maximum length is taken
    before a request starts.
    """

    order: str
    reserve: bool

    def plan(self, step: StepBuilder) -> None: ...
