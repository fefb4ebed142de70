"""The scheduling core and a real stage in one process, in real time: a load without a server.

What is measured is what the scheduler and the GPU do; HTTP, Ray and detokenizing are left out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from actors.scheduling.build import build_core
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.events import Emit, Execute, Instruction, StepDone, Submit, Tick, WakeAt
from actors.scheduling.plan import StepPlan, StepResult
from actors.stage.runner import StageRunner
from app.simulate.run.record import RunRecord, Summary, summarize
from app.simulate.run.simulation import requests_of
from app.simulate.workload.requests import Workload


class LiveRun:
    """One workload through one core and one stage. record: times are seconds since the start."""

    def __init__(self, runner: StageRunner, config: SchedulerConfig, workload: Workload) -> None:
        self._runner = runner
        self._core = build_core(config)
        self._workload = workload
        self.record = RunRecord(len(workload))
        self.record.arrival_s = workload.arrival_s.tolist()
        self._plans: deque[StepPlan] = deque()
        self._wake_s: float | None = None
        self._begin_s = 0.0

    def run(self, give_up_after_s: float | None = None) -> Summary:
        """Serve to the last token, or until `give_up_after_s`."""
        build = requests_of(self._workload)
        arrivals = deque(enumerate(self.record.arrival_s))
        self._begin_s = time.perf_counter()
        now_s = 0.0
        while (arrivals or not self._core.is_idle) and now_s < (give_up_after_s or float("inf")):
            now_s = self._now_s()
            while arrivals and arrivals[0][1] <= now_s:
                index, _ = arrivals.popleft()
                self._carry_out(self._core.handle(Submit(build(index)), self._now_s()))
            if self._plans:
                self._step(self._plans.popleft())
            elif self._wake_s is not None and self._wake_s <= now_s:
                self._wake_s = None
                self._carry_out(self._core.handle(Tick(), now_s))
            else:
                due_s = arrivals[0][1] if arrivals else now_s
                wake_s = due_s if self._wake_s is None else min(due_s, self._wake_s)
                time.sleep(max(0.0, wake_s - self._now_s()))
        self.record.end_s = self._now_s()
        # The stage forgets them all, those too that were given up; no step has this number.
        self._runner.execute(StepPlan(-1, (), released=tuple(range(len(self._workload)))), None)
        return summarize(self.record, tbt_objective_s=self._core.config.tbt_s)

    def _now_s(self) -> float:
        return time.perf_counter() - self._begin_s

    def _step(self, plan: StepPlan) -> None:
        begin_s = self._now_s()
        for started in plan.started:
            self.record.num_starts[started.request_id] += 1
            if self.record.num_starts[started.request_id] == 1:
                self.record.started_s[started.request_id] = begin_s
        # With lookahead the core has planned the next step already: the GPU may have it now.
        result = self._runner.execute(
            plan, None, lambda wait_s: self._plans[0] if self._plans else None
        )
        if not isinstance(result, StepResult):
            raise TypeError("a live run needs the whole model in one stage")
        end_s = self._now_s()
        self.record.num_steps += 1
        self.record.busy_s += end_s - begin_s
        self._carry_out(self._core.handle(StepDone(result), end_s))

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Execute):
                self._plans.append(instruction.plan)
            elif isinstance(instruction, Emit):
                self._emit(instruction)
            elif isinstance(instruction, WakeAt):
                self._wake_s = instruction.time_s

    def _emit(self, emit: Emit) -> None:
        record, now_s = self.record, self._now_s()
        for output in emit.outputs:
            i = output.request_id
            if output.tokens:  # a gap for each delivery, as its client sees them
                if record.num_output_tokens[i]:
                    gap_s = now_s - record.last_token_s[i]
                    record.gaps_s.append(gap_s)
                    record.max_gap_s[i] = max(record.max_gap_s[i], gap_s)
                else:
                    record.first_token_s[i] = now_s
                record.last_token_s[i] = now_s
                record.num_output_tokens[i] += len(output.tokens)
            if output.finish_reason is not None:
                record.finished_s[i] = now_s
