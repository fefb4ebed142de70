"""Single steps on a pipeline without requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from actors.scheduling.plan import StepPlan, StepResult
from actors.transport.messages import StepError
from actors.transport.running_time import running_timeout

ANSWER_WITHIN_S = 120.0


class ProbeFailed(Exception):
    """A stage raised, died or did not answer; the message says which."""


class StepNotFinite(ProbeFailed):
    """The measuring tokens overflow this model; those of requests may not."""


class PipelineProbe:
    """Runs one step at a time; the pipeline's owner passes the answer to `answered`."""

    def __init__(self, submit: Callable[[StepPlan], None]) -> None:
        self._submit = submit
        self._answer: asyncio.Future[StepResult] | None = None

    async def run(self, plan: StepPlan) -> StepResult:
        """Raises ProbeFailed."""
        answer = self._answer = asyncio.get_running_loop().create_future()
        self._submit(plan)
        try:
            async with running_timeout(ANSWER_WITHIN_S):
                return await answer
        except TimeoutError:
            raise ProbeFailed(f"no answer within {ANSWER_WITHIN_S:.0f} s") from None

    def answered(self, answer: StepResult | StepError) -> None:
        if self._answer is None or self._answer.done():
            return
        if isinstance(answer, StepError):
            kind = StepNotFinite if answer.message.startswith("NotFinite") else ProbeFailed
            self._answer.set_exception(kind(answer.message))
        else:
            self._answer.set_result(answer)

    def lost(self, reason: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ProbeFailed(reason))
