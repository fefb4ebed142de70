"""The core over a pipeline of stage actors, without the engine around it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from actors.scheduling.core import Core
from actors.scheduling.events import Emit, Event, Execute, StepDone, Submit
from actors.scheduling.plan import StepResult
from actors.scheduling.request import Request, SamplingParams
from actors.transport.graph_pipeline import GraphPipeline
from actors.transport.messages import StepError

StageTimes = tuple[tuple[float, float], ...]


async def answered(
    core: Core,
    pipeline: GraphPipeline,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    stage_times_s: list[StageTimes],
) -> tuple[list[list[int]], int]:
    """Answers to the prompts, and the most steps that were in flight at once. Notes the stages'
    times of every step."""
    answers: list[list[int]] = [[] for _ in prompts]
    finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    most_in_flight, num_left = 0, len(prompts)

    def handle(event: Event) -> None:
        nonlocal num_left, most_in_flight
        for instruction in core.handle(event, time.monotonic()):
            if isinstance(instruction, Execute):
                pipeline.submit(instruction.plan)
            elif isinstance(instruction, Emit):
                for output in instruction.outputs:
                    answers[output.request_id] += output.tokens
                    num_left -= output.finish_reason is not None
        most_in_flight = max(most_in_flight, len(core.in_flight))
        if num_left == 0 and not core.in_flight and not finished.done():
            finished.set_result(None)

    def on_answer(answer: StepResult | StepError) -> None:
        stage_times_s.append(() if isinstance(answer, StepError) else answer.stage_times_s)
        if isinstance(answer, StepError):
            on_lost(answer.message)
        else:
            handle(StepDone(answer))

    def on_lost(reason: str) -> None:
        if not finished.done():
            finished.set_exception(RuntimeError(reason))

    await pipeline.open()
    pipeline.listen(on_answer, on_lost)
    sampling = SamplingParams(max_tokens)
    for i, prompt in enumerate(prompts):
        handle(Submit(Request(i, tuple(prompt), sampling, time.monotonic())))
    await finished
    return answers, most_in_flight
