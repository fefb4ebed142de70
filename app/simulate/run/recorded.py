"""The traffic of a recorded event log: requests, answers and their times.

An event log (`telemetry.events`) holds every request as the core received it and every sampled
token, so a simulated prefix cache has the same hits as the live one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.cost.model import CostModel
from actors.scheduling.event_log import Row, config_of, from_row
from actors.scheduling.events import (
    Emit,
    Execute,
    Instruction,
    Reconfigure,
    Refuse,
    Submit,
)
from actors.scheduling.request import FinishReason, Request, SamplingParams
from app.simulate.hardware.live_log import LiveStep, ratios, runs, slowdown
from app.simulate.run.record import Floats, RunRecord
from app.simulate.run.simulation import Deployment
from app.simulate.workload.requests import Workload

END = -2  # sampled where the recorded answer ended; neither a token nor `NOT_FINITE`


@dataclass(slots=True)
class Recorded:
    """A log as traffic. Ids count from 0 in order of arrival, times from the first arrival.

    config: in effect when the log began. requests: for a simulated core, which knows only
    `max_tokens` of their lengths, as the live one did; `token_of` ends them. outputs: the sampled
    tokens of each request. record: of the live run. notes: gaps in the log, in words.
    """

    config: SchedulerConfig
    requests: list[Request]
    outputs: list[list[int]]
    record: RunRecord
    steps: list[LiveStep]
    notes: list[str] = field(default_factory=list)

    @property
    def workload(self) -> Workload:
        """The workload of the recorded requests."""
        return Workload(
            np.array(self.record.arrival_s),
            np.array([len(request.prompt) for request in self.requests]),
            np.array([max(1, len(tokens)) for tokens in self.outputs]),
            name="recorded",
        )

    def token_of(self, request_id: int, position: int) -> int:
        """The recorded token at a position, or `END` after the last."""
        request, outputs = self.requests[request_id], self.outputs[request_id]
        number = position - len(request.prompt) - len(request.output)
        if number < len(outputs) - 1:
            return outputs[number]
        return END if outputs else 0

    def objectives_s(self, config: SchedulerConfig) -> tuple[Floats, Floats]:
        """TBT and TTFT objectives of each request: its own, or else the configuration's."""
        own = [request.objective for request in self.requests]
        tbt_s = [o.tbt_s or config.tbt_s or np.inf for o in own]
        ttft_s = [o.ttft_s or config.ttft_s or np.inf for o in own]
        return np.array(tbt_s), np.array(ttft_s)


def read_traffic(rows: Sequence[Row]) -> Recorded:
    """Read a log. Requests that left the queue are left out: what they would have asked of the
    stages is not known. Raises ValueError if the rows are not a log or hold no other request."""
    if not rows:
        raise ValueError("the log is empty")
    config = config_of(rows[0])
    parsed = [from_row(row) for row in rows[1:]]
    arrived = [(at_s, event.request) for at_s, event, _ in parsed if isinstance(event, Submit)]
    if not arrived:
        raise ValueError("no request arrived in this log")
    unserved = _left_the_queue(instructions for _, _, instructions in parsed)
    arrived = [(at_s, request) for at_s, request in arrived if request.request_id not in unserved]
    if not arrived:
        raise ValueError("every request of this log left the queue")
    origin_s = arrived[0][0]
    numbers = {request.request_id: number for number, (_, request) in enumerate(arrived)}
    record = RunRecord(len(arrived))
    record.arrival_s = [at_s - origin_s for at_s, _ in arrived]
    outputs: list[list[int]] = [[] for _ in arrived]
    reasons: dict[int, FinishReason] = {}
    changes = num_drafted = 0
    for at_s, event, instructions in parsed:
        now_s = at_s - origin_s
        changes += isinstance(event, Reconfigure)
        for instruction in instructions:
            if isinstance(instruction, Execute):
                record.num_steps += 1
                num_drafted += bool(instruction.plan.drafts)
                for start in instruction.plan.started:
                    record.started(numbers[start.request_id], now_s)
            elif isinstance(instruction, Refuse):
                number = numbers[instruction.request_id]
                record.refused(replace(instruction, request_id=number), now_s)
            elif isinstance(instruction, Emit):
                told = [
                    o._replace(request_id=numbers[o.request_id])
                    for o in instruction.outputs
                    if o.request_id in numbers
                ]
                record.emitted(told, now_s)
                for output in told:
                    outputs[output.request_id] += output.tokens
                    if output.finish_reason is not None:
                        reasons[output.request_id] = output.finish_reason
    for number, reason in reasons.items():
        is_left = reason is FinishReason.ABORT and not outputs[number]
        if is_left or reason is FinishReason.ERROR:
            record.finished_s[number] = np.nan  # it was not answered
    steps = list(itertools.chain.from_iterable(runs(rows)))
    record.busy_s = sum([step.seconds for step in steps]) * config.num_stages
    found = Recorded(config, [], outputs, record, steps)
    for number, (_, request) in enumerate(arrived):
        was_refused = not np.isnan(record.refused_s[number])
        if not outputs[number] and not was_refused:
            outputs[number].append(END)  # its prompt was computed without an answer
        sampling = SamplingParams(
            1 if request.pooling else request.sampling.max_tokens, stop_token_ids=(END,)
        )
        found.requests.append(
            replace(
                request,
                request_id=number,
                arrival_s=record.arrival_s[number],
                sampling=sampling,
                pooling=None,
            )
        )
    found.notes = _notes(found, reasons, len(unserved), changes, num_drafted)
    return found


def _left_the_queue(messages: Iterable[Sequence[Instruction]]) -> set[int]:
    """Requests that were in no step when their caller left."""
    begun, left = set[int](), set[int]()
    for instruction in itertools.chain.from_iterable(messages):
        if isinstance(instruction, Execute):
            begun.update(start.request_id for start in instruction.plan.started)
        elif isinstance(instruction, Emit):
            ended = [o for o in instruction.outputs if o.finish_reason is FinishReason.ABORT]
            left.update(output.request_id for output in ended)
    return left - begun


def _notes(
    found: Recorded,
    reasons: dict[int, FinishReason],
    num_unserved: int,
    changes: int,
    num_drafted: int,
) -> list[str]:
    record = found.record
    refused = sum(not np.isnan(at_s) for at_s in record.refused_s)
    aborted = [number for number, reason in reasons.items() if reason is FinishReason.ABORT]
    left = sum(record.num_output_tokens[number] > 0 for number in aborted)
    failed = sum(reason is FinishReason.ERROR for reason in reasons.values())
    open_ = len(found.requests) - len(reasons) - refused
    told = [
        (refused, "were refused: how long they would have run is not known, max_tokens is taken"),
        (
            left,
            "were ended by their caller (or a stop string): they end after as many tokens, and "
            "count as completed",
        ),
        (num_unserved, "were left by their caller before their first step: they are left out"),
        (
            len(aborted) - left,
            "were left by their caller before their first token: what happened does not count them "
            "as completed; simulated, they end after their prompt",
        ),
        (
            failed,
            "failed: what happened does not count them as completed; simulated, they end after as "
            "many tokens",
        ),
        (open_, "were still open when the log ended: they end after the tokens they had"),
    ]
    notes = [f"{count} requests {what}" for count, what in told if count]
    if changes:
        notes.append(
            f"settings were changed {changes} times while it ran: simulated are those it began with"
        )
    if num_drafted:
        notes.append(f"{num_drafted} steps verified drafts: simulated are engines without any")
    return notes


def measured_deployment(
    config: SchedulerConfig, profile: CostModel, steps: Sequence[LiveStep]
) -> Deployment:
    """The machine that these steps show, under a core that believes the profile.

    Raises ValueError without steps.
    """
    seen = slowdown(steps, profile)
    return Deployment(
        config,
        # The pause between two steps counts as stage time, because the next step waits for it.
        replace(profile, overhead_s=profile.overhead_s + seen.gap_s),
        believed=profile,
        host_s=seen.answer_s,
        ratios=ratios(steps, profile),
    )
