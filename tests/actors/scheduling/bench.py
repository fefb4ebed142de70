"""A step builder to be called by hand."""

from __future__ import annotations

from typing import Any

from actors.scheduling.admission.limits import AcceptAll
from actors.scheduling.budgets.fixed import FixedBudget
from actors.scheduling.lifecycle import LiveRequests
from actors.scheduling.state import RequestState
from actors.scheduling.step import StepBuilder
from tests.actors.scheduling.short_lives import config, request


class Bench:
    """A builder and its requests without a core: the test answers the steps. Blocks of 4."""

    def __init__(self, budget: FixedBudget | None = None, **changes: Any) -> None:
        self.requests = LiveRequests(config(watermark=0.0, **changes), "fcfs", None)
        self.step = StepBuilder(
            self.requests, budget or FixedBudget(64), AcceptAll(), reserve=False, tier=None
        )
        self.num_steps = 0

    def begin(self) -> StepBuilder:
        self.num_steps += 1
        self.step.begin(self.num_steps)
        return self.step

    def waiting(self, number: int, prompt: int, priority: int = 0) -> RequestState:
        asked = request(number, prompt=prompt, output=20, priority=priority)
        state = RequestState(asked, number, max_model_len=64)
        self.requests.add(state)
        return state

    def decoding(self, number: int, prompt: int, priority: int = 0) -> RequestState:
        """Its prompt is computed and its first token known."""
        state = self.waiting(number, prompt, priority)
        assert self.begin().start(state, prompt) == prompt
        self.step.build()
        state.in_flight = 0
        state.output_token_ids.append(7)
        state.num_tokens += 1
        return state

    def ids(self) -> list[int]:
        return [part[0] for part in self.step.contents.decode_slices]
