"""What each iteration was, for the timeline, the metrics and the logs."""

from __future__ import annotations

from typing import Any

from actors.scheduling.core import Core
from actors.scheduling.plan import StepResult
from actors.step_deadline import Outstanding

_EVERY_S = 0.1  # how long records wait for others, while there are steps


class IterationRecords:
    """Rows of `messages.ITERATION_FIELDS`, gathered until it is time to send them.

    They come some at a time because a step leaves cold caches, and whoever handles one record
    an iteration fetches all its code anew.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._rows: list[list[Any]] = []
        self._sent_s = 0.0

    def note(self, step: Outstanding, done_s: float, answer: StepResult, recoveries: int) -> None:
        """To be called before the core has heard of the answer."""
        core = self._core
        num_decodes = core.in_flight[0].shape.num_decodes
        requests = core.requests
        self._rows.append(
            [
                step.plan.step_id,
                step.submitted_s,
                done_s,
                step.predicted_s,
                num_decodes,
                step.num_tokens - num_decodes,
                len(step.plan.slices),
                answer.stage_times_s,
                len(requests.decoding),
                len(requests.prefilling),
                requests.num_waiting,
                requests.num_free_blocks,
                requests.num_preemptions,
                recoveries,
                core.config.token_budget,
            ]
        )

    def take_due(self, now_s: float) -> list[list[Any]]:
        """What has been gathered, every so often and at once before the engine rests."""
        if self._core.in_flight and now_s - self._sent_s < _EVERY_S:
            return []
        rows, self._rows = self._rows, []
        self._sent_s = now_s
        return rows
