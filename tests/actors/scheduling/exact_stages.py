"""Stages whose steps take as long as the cost model says. Every token is the same."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from itertools import takewhile

from actors.scheduling.core import Core
from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.model import CostModel
from actors.scheduling.events import Event, Execute, StepDone, Submit
from actors.scheduling.plan import StepResult
from actors.scheduling.request import Request

TOKEN = 9


class ExactStages:
    """came_s: when the tokens of each request came. late_s: from a step's end to its answer."""

    def __init__(
        self, core: Core, model: CostModel, requests: Iterable[Request], late_s: float = 0.0
    ) -> None:
        self.core = core
        self.came_s: dict[int, list[float]] = {}
        self._model = model
        self._late_s = late_s
        self._free_s = [0.0] * model.num_stages
        self._num_events = 0
        self._events: list[tuple[float, int, Event]] = []
        for request in requests:
            self._add(request.arrival_s, Submit(request))
        heapify(self._events)

    @property
    def is_busy(self) -> bool:
        return bool(self._events)

    @property
    def next_s(self) -> float:
        """When the next event is."""
        return self._events[0][0]

    def advance(self) -> None:
        """Handle the next event."""
        now_s, _, event = heappop(self._events)
        if isinstance(event, StepDone):
            extra = dict(event.result.extra_tokens)
            for request_id, _ in event.result.tokens:
                times = [now_s] * (1 + len(extra.get(request_id, ())))
                self.came_s.setdefault(request_id, []).extend(times)
        for told in self.core.handle(event, now_s):
            if isinstance(told, Execute):
                self._run(told, now_s)

    def _run(self, told: Execute, now_s: float) -> None:
        """Every stage begins with it once it is there and the step before has left."""
        plan, model = told.plan, self._model
        mix = Mix.of(plan.slices, model.attention_window)
        arrives_s, times = now_s, list[tuple[float, float]]()
        for stage, free_s in enumerate(self._free_s):
            begin_s = max(arrives_s, free_s)
            self._free_s[stage] = begin_s + model.stage_s(mix)
            times.append((begin_s, self._free_s[stage]))
            arrives_s = self._free_s[stage] + model.send_s(mix.num_tokens)
        tokens = tuple((part.request_id, TOKEN) for part in plan.named_slices if part.samples)
        extra = [(request_id, len([*takewhile(TOKEN.__eq__, d)])) for request_id, d in plan.drafts]
        result = StepResult(
            plan.step_id, tokens, stage_times_s=tuple(times),
            extra_tokens=tuple((request_id, (TOKEN,) * n) for request_id, n in extra if n),
        )  # fmt: skip
        self._add(self._free_s[-1] + self._late_s, StepDone(result))

    def _add(self, at_s: float, event: Event) -> None:
        self._num_events += 1
        heappush(self._events, (at_s, self._num_events, event))
