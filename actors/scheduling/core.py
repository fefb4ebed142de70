"""The scheduling core: `handle(event, now_s) -> instructions` is the only way anything changes.

After each event the core plans as many steps as the pipeline has room for. It reads no clock
and does no I/O, so the same events give the same plans, live, simulated or replayed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.events import (
    Abort,
    Emit,
    Event,
    Execute,
    Instruction,
    Output,
    PipelineLost,
    Reconfigure,
    Refuse,
    StepDone,
    StepFailed,
    Submit,
    Tick,
    WakeAt,
)
from actors.scheduling.faults import Faults
from actors.scheduling.admission.limits import Intake
from actors.scheduling.interfaces import Admission, CostModel, EngineView, TokenBudget
from actors.scheduling.outcomes import Outcomes
from actors.scheduling.parts import build_admission, build_budget
from actors.scheduling.policies import Policy, build_policy
from actors.scheduling.request import FinishReason
from actors.scheduling.memory.running import Residents
from actors.scheduling.state import Fate, RequestState, Status
from actors.scheduling.step import InFlight, StepBuilder

# What a part was built from: if one of these changes, it is built anew.
_ADMISSION_KEYS = ("admission", "admission_options", "max_requests", "tbt_s", "ttft_s")
_BUDGET_KEYS = ("budget", "budget_options", "token_budget", "max_requests", "tbt_s", "ttft_s")


class Core:
    """Build it with `build_core`; `view` is for reading."""

    def __init__(
        self,
        config: SchedulerConfig,
        budget: TokenBudget,
        admission: Admission,
        cost_model: CostModel | None = None,
    ) -> None:
        self.config = config
        self.cost_model = cost_model
        self.policy: Policy = build_policy(config)
        self.residents = Residents(config, self._order_name(), cost_model)
        self.step = StepBuilder(self.residents, budget, admission, self.policy.reserve)
        self.intake = Intake(config, admission)
        self.outcomes = Outcomes(self.residents)
        self.faults = Faults(self.residents, self.outcomes)
        self.in_flight: deque[InFlight] = deque()
        self.residents.in_flight = self.in_flight
        self.num_steps = 0  # planned so far: the next step's id
        self.num_forced_steps = 0  # planned because the policy alone would have stood still
        self._num_submitted = 0
        self._last_answer_s = 0.0
        self._wake_at_s: float | None = None
        self._handlers: Mapping[type, Callable[[Any, list[Instruction]], None]] = {
            Submit: self._submit,
            Abort: self._abort,
            StepDone: self._step_done,
            StepFailed: self._step_failed,
            PipelineLost: self._pipeline_lost,
            Reconfigure: self._reconfigure,
            Tick: self._tick,
        }

    @property
    def view(self) -> EngineView:
        return self.residents

    @property
    def is_idle(self) -> bool:
        """No request is here and no step is outstanding."""
        return not self.residents.states and not self.in_flight

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        """Take one event; `now_s` never decreases from call to call.

        Raises ConfigError for an impossible Reconfigure (nothing has changed then) and
        ValueError for an answer that matches no outstanding step.
        """
        self.residents.now_s = now_s
        out: list[Instruction] = []
        self._handlers[type(event)](event, out)
        if self.config.queue_timeout_s is not None:
            self._expire(now_s, out)
        self._plan(now_s, out)
        return out

    def statistics(self) -> dict[str, float]:
        """Plain numbers for metrics and the console."""
        residents = self.residents
        return {
            "num_waiting": residents.num_waiting,
            "num_waiting_tokens": residents.num_waiting_tokens,
            "num_decoding": len(residents.decoding),
            "num_prefilling": len(residents.prefilling),
            "num_leaving": residents.num_leaving,
            "num_in_flight": len(self.in_flight),
            "num_steps": self.num_steps,
            "num_forced_steps": self.num_forced_steps,
            "num_blocks": self.config.num_blocks,
            "num_free_blocks": residents.blocks.num_free,
            "num_cached_blocks": residents.blocks.num_cached,
            "num_evictions": residents.blocks.num_evictions,
            "num_preemptions": residents.num_preemptions,
            "num_swaps": residents.swap.num_swaps,
            "num_free_host_blocks": residents.swap.host.num_free,
            "tokens_per_s": self.intake.tokens_per_s,
        }

    # ---- events -----------------------------------------------------------------------

    def _submit(self, event: Submit, out: list[Instruction]) -> None:
        request = event.request
        refusal = self.intake.refusal(request, self.residents)
        if refusal is not None:
            out.append(refusal)
            return
        self._num_submitted += 1
        state = RequestState(request, self._num_submitted, self.config.max_model_len)
        state.cacheable = (
            self.config.prefix_cache
            and request.sampling.prompt_logprobs is None
            and request.pooling in (None, "last")  # other poolings need every hidden state
        )
        reason = self.outcomes.already_over(state)
        if reason is not None:
            out.append(Emit((Output(state.request_id, state.num_output_tokens, (), reason),)))
            return
        self.residents.enter(state)
        self.intake.entered(state, self.residents.now_s)

    def _abort(self, event: Abort, out: list[Instruction]) -> None:
        state = self.residents.states.get(event.request_id)
        if state is None or (state.status is Status.LEAVING and state.fate is Fate.END):
            return
        self.outcomes.end(state)
        index = state.num_output_tokens
        out.append(Emit((Output(state.request_id, index, (), FinishReason.ABORT),)))

    def _step_done(self, event: StepDone, out: list[Instruction]) -> None:
        step = self._answered(event.result.step_id)
        now_s = self.residents.now_s
        times = event.result.stage_times_s
        if times:
            duration_s = max([end - start for start, end in times])
        else:
            duration_s = now_s - max(step.planned_at_s, self._last_answer_s)
        self._last_answer_s = now_s
        self.step.budget.observe(step.shape, duration_s)
        if self.cost_model is not None:
            self.cost_model.observe(step.shape, duration_s)
        self.intake.observe(step.shape.num_tokens, duration_s)
        self.faults.cleared(step)
        outputs = self.outcomes.take(step, event.result)
        if outputs:
            out.append(Emit(tuple(outputs)))

    def _step_failed(self, event: StepFailed, out: list[Instruction]) -> None:
        step = self._answered(event.step_id)
        self._last_answer_s = self.residents.now_s
        outputs = self.faults.step_failed(step, event.message, event.culprit)
        if outputs:
            out.append(Emit(tuple(outputs)))

    def _answered(self, step_id: int) -> InFlight:
        """Steps are answered in order; the oldest is done with."""
        if not self.in_flight or self.in_flight[0].plan.step_id != step_id:
            oldest = self.in_flight[0].plan.step_id if self.in_flight else None
            raise ValueError(f"answer to step {step_id}, but the oldest outstanding is {oldest}")
        step = self.in_flight.popleft()
        self.residents.num_in_flight -= 1
        if step.pinned:
            self.residents.blocks.free(step.pinned)
        if step.host_blocks:
            self.residents.swap.host.free(step.host_blocks)
        return step

    def _pipeline_lost(self, event: PipelineLost, out: list[Instruction]) -> None:
        steps = list(self.in_flight)
        self.in_flight.clear()
        self.residents.num_in_flight = 0
        outputs = self.faults.pipeline_lost(steps)
        if outputs:
            out.append(Emit(tuple(outputs)))

    def _reconfigure(self, event: Reconfigure, out: list[Instruction]) -> None:
        config = self.config.with_changes(event.changes)
        # Everything that may refuse its options comes before anything changes.
        old, policy, budget = self.config, self.policy, self.step.budget
        admission = self.intake.admission
        if config.differs(old, "policy", "policy_options", "max_requests"):
            policy = build_policy(config)
        if config.differs(old, *_BUDGET_KEYS):
            budget = build_budget(config, self.cost_model)
        if config.differs(old, *_ADMISSION_KEYS):
            admission = build_admission(config, self.cost_model)
        order = config.order if config.order != "auto" else policy.order
        if order != self._order_name() or config.differs(old, "order_options", "ttft_s"):
            self.residents.switch_order(order, config)
            self.residents.resort()
        self.config = self.residents.config = self.residents.swap.config = config
        self.intake.config = config
        self.policy = policy
        self.intake.admission = admission
        if config.max_running_per_tenant is None:
            self.residents.unpark_all()
        self.step = StepBuilder(self.residents, budget, admission, policy.reserve)

    def _order_name(self) -> str:
        return self.config.order if self.config.order != "auto" else self.policy.order

    def _tick(self, event: Tick, out: list[Instruction]) -> None:
        self._wake_at_s = None

    def _expire(self, now_s: float, out: list[Instruction]) -> None:
        """Refuse who has waited too long; ask to be woken for the next."""
        for state in self.intake.overdue(now_s):
            self.residents.drop_waiting(state)
            message = f"waited {self.config.queue_timeout_s} s without starting"
            out.append(Refuse(state.request_id, message, None, 1.0))
        wake_at_s = self.intake.next_timeout_s()
        if wake_at_s is not None and wake_at_s != self._wake_at_s:
            self._wake_at_s = wake_at_s
            out.append(WakeAt(wake_at_s))

    # ---- planning ---------------------------------------------------------------------

    def _plan(self, now_s: float, out: list[Instruction]) -> None:
        """Plan greedily while the pipeline has room and there is work."""
        in_flight, residents = self.in_flight, self.residents
        while len(in_flight) < self.config.depth and residents.states:
            step = self._plan_one()
            if step is None:
                return
            self.num_steps += 1
            in_flight.append(step)
            residents.num_in_flight += 1
            predicted_s = None
            if self.cost_model is not None:
                predicted_s = self.cost_model.step_s(step.shape)
            out.append(Execute(step.plan, predicted_s))

    def _plan_one(self) -> InFlight | None:
        builder = self.step
        builder.clear(self.num_steps)
        if self.residents.isolated and self._plan_suspect(builder):
            return builder.build()
        self.policy.plan(builder)
        if builder.empty and not self.in_flight:
            self._plan_anything(builder)
        return builder.build()

    def _plan_suspect(self, builder: StepBuilder) -> bool:
        """A step that holds one suspect alone, if it can start now."""
        return builder.start(self.residents.isolated[0], builder.config.max_step_tokens) > 0

    def _plan_anything(self, builder: StepBuilder) -> None:
        """Progress comes before policy: nothing is in flight, so nothing else would wake us."""
        self.num_forced_steps += 1
        builder.decode(self.residents.decoding)
        for state in builder.runnable_prefills():
            builder.chunk(state, builder.room)
        if builder.empty:
            head = builder.head()
            if head is not None:
                builder.start(head, builder.room)
