"""What a policy is, and what is planned where it plans nothing."""

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


def plan_anything(step: StepBuilder) -> None:
    """Progress comes before policy: with nothing in flight, nothing would wake the core."""
    step.decode(step.decoding)
    for state in step.runnable_prefills():
        step.chunk(state, step.room)
    if step.empty and (head := step.head()) is not None:
        step.start(head, step.room)
