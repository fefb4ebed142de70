"""The interface of policies, and the fallback for an empty plan."""

from __future__ import annotations

from typing import Protocol

from actors.scheduling.step import StepBuilder


class Policy(Protocol):
    """Adds slices to the step through the builder; deterministic, and keeps no request.

    order: the waiting order of the policy's description. reserve: KV for the maximum length is
    allocated before a request starts.
    """

    order: str
    reserve: bool

    def plan(self, step: StepBuilder) -> None: ...


def plan_anything(step: StepBuilder) -> None:
    """Plan something even if the policy does not: with nothing in flight no event would follow."""
    step.decode(step.decoding)
    for state in step.runnable_prefills():
        step.chunk(state, step.room)
    if step.contents.is_empty and (head := step.head()) is not None:
        step.start(head, step.room)
