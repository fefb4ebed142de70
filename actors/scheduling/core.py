"""The scheduling core: `handle(event, now_s) -> instructions` is the only way requests change.

After each event the core plans as many steps as the pipeline has room for. It reads no clock
and does no I/O, so the same events give the same plans, live, simulated or replayed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from actors.scheduling.admission import build_admission
from actors.scheduling.admission.limits import QueueLimits
from actors.scheduling.admission.quote import quote
from actors.scheduling.budgets import build_budget
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.events import (
    Abort,
    AdapterLoads,
    DeliveryTook,
    Emit,
    Event,
    Execute,
    Instruction,
    Output,
    PeerEvent,
    PipelineLost,
    Reconfigure,
    ResetPrefixCache,
    StepDone,
    StepFailed,
    Submit,
    Tick,
    TierEvent,
    TurnedAway,
)
from actors.scheduling.faults import Faults
from actors.scheduling.interfaces import (
    Admission,
    EngineView,
    PrefixCache,
    Quote,
    QuoteRequest,
    StepTimePredictor,
    TokenBudget,
)
from actors.scheduling.lifecycle import LiveRequests
from actors.scheduling.outcomes import Outcomes
from actors.scheduling.policies import build_policy, order_name
from actors.scheduling.policies.base import plan_anything
from actors.scheduling.queue_timeout import QueueTimeout
from actors.scheduling.request import FinishReason
from actors.scheduling.second_tier import SecondTier
from actors.scheduling.speculation.speculation import Speculation
from actors.scheduling.state import Fate, InFlight, RequestState, RequestStatus
from actors.scheduling.step import StepBuilder

# What a part was built from: if one of these changes, it is built anew.
_BOTH_KEYS = (  # an admission predicts the steps of the budget
    "admission", "budget", "budget_options", "token_budget", "max_requests", "tbt_s", "ttft_s",
)  # fmt: skip
_ADMISSION_KEYS, _BUDGET_KEYS = ("admission_options", *_BOTH_KEYS), ("delivery_s", *_BOTH_KEYS)


class Core:
    """Build it with `build_core`. `handle` changes it; its properties are for the engine around."""

    def __init__(
        self,
        config: SchedulerConfig,
        budget: TokenBudget,
        admission: Admission,
        cost_model: StepTimePredictor | None = None,
    ) -> None:
        self.config = config
        self.cost_model = cost_model
        self.policy = build_policy(config)
        self.order = order_name(config, self.policy)  # of the waiting queue
        self.in_flight: deque[InFlight] = deque()
        self.requests = LiveRequests(config, self.order, cost_model, self.in_flight)
        self.limits = QueueLimits(config, admission, cost_model)
        self.timeout = QueueTimeout(self.requests)
        self.speculation = Speculation(config, cost_model)
        self.outcomes = Outcomes(self.requests, self.speculation.ended)
        self.faults = Faults(self.requests)
        self.tier = SecondTier(self.requests) if config.tier_ranks and config.prefix_cache else None
        self.builder = StepBuilder(self.requests, budget, admission, self.policy.reserve, self.tier)
        self.num_steps = 0  # planned so far: the next step's id
        self.num_forced_steps = 0  # planned because the policy alone would have stood still
        self._num_submitted = 0
        self.last_answer_s = 0.0
        self._handlers: Mapping[type, Callable[[Any, list[Instruction]], None]] = {
            Submit: self._submit,
            Abort: self._abort,
            StepDone: self._step_done,
            StepFailed: self._step_failed,
            PipelineLost: self._pipeline_lost,
            Reconfigure: self._reconfigure,
            ResetPrefixCache: lambda *_: (self.tier or self.requests).forget_cached(),
            DeliveryTook: lambda told, _: self.builder.budget.delivery_took(told.seconds),
            AdapterLoads: lambda told, _: self.requests.adapters_load(told.number),
            TurnedAway: lambda told, _: self.limits.turned_away(told.refused, self.requests.now_s),
            Tick: lambda *_: self.timeout.woken(),
            **dict.fromkeys(get_args(TierEvent), self._tier_event),
        }

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        """Take one event; `now_s` never decreases from call to call.

        Raises ConfigError for an impossible Reconfigure (nothing has changed then), and ValueError
        for an answer that is not to the oldest outstanding step or not to its slices.
        """
        self.requests.now_s = now_s
        out: list[Instruction] = []
        self._handlers[type(event)](event, out)
        if self.config.queue_timeout_s is not None:
            out += self.timeout.expire(self.num_steps)
        if self.tier is not None:
            self.tier.fetch_ahead()  # a fetch may begin while no step can
        self._plan(out)
        if self.tier is not None:
            out += self.tier.pop_moves()
        return out

    def quote(self, asked: QuoteRequest, now_s: float) -> Quote:
        """Forecast for a request that arrived now (`admission.quote`); changes no state."""
        return quote(self.requests, self.limits, asked, now_s)

    # ---- readings: see also `statistics` -------------------------------------------------

    @property
    def view(self) -> EngineView:
        """The queue, the running requests and the memory."""
        return self.requests

    @property
    def is_idle(self) -> bool:
        """No request is here and no step is outstanding."""
        return not self.requests.by_id and not self.in_flight

    @property
    def live_requests(self) -> Mapping[int, RequestState]:
        """Every request that is waiting, running or finishing, by id."""
        return self.requests.by_id

    @property
    def trials(self) -> Sequence[Sequence[RequestState]]:
        """Suspects of a fault in the groups in which they are tried, the first one first."""
        return self.requests.trials

    @property
    def num_failures_in_a_row(self) -> int:
        return self.faults.num_failures_in_a_row

    @property
    def num_preemptions(self) -> int:
        return self.requests.num_preemptions

    @property
    def num_prefilled_tokens(self) -> int:
        """Computed in answered steps."""
        return self.outcomes.num_prefilled_tokens

    @property
    def token_budget(self) -> int:
        """Budget of the last step that had room for prefill."""
        return self.builder.token_budget

    @property
    def holds_starts(self) -> bool:
        """See `TokenBudget`."""
        return self.builder.budget.holds_starts

    @property
    def prefix_cache(self) -> PrefixCache:
        return self.requests.running.block_manager

    # ---- events -----------------------------------------------------------------------

    def _submit(self, event: Submit, out: list[Instruction]) -> None:
        request = event.request
        joins = request.group is not None and request.group in self.requests.waiting.groups
        refusal = self.limits.on_submit(request, self.requests, joins)
        if refusal is not None:
            out.append(refusal)
            return
        self._num_submitted += 1
        state = RequestState(request, self._num_submitted, self.config.max_model_len)
        if (reason := self.outcomes.already_over(state)) is not None:
            out.append(Emit((Output(state.request_id, state.num_output_tokens, (), reason),)))
            return
        if request.num_losses:
            self.faults.suspect_from_before(state)
        self.requests.add(state)

    def _abort(self, event: Abort, out: list[Instruction]) -> None:
        state = self.requests.by_id.get(event.request_id)
        if state is None or (state.status is RequestStatus.FINISHING and state.fate is Fate.END):
            return
        self.requests.end(state)
        index = state.num_output_tokens
        out.append(Emit((Output(state.request_id, index, (), FinishReason.ABORT),)))

    def _step_done(self, event: StepDone, out: list[Instruction]) -> None:
        result, now_s = event.result, self.requests.now_s
        step, times = self._pop_answered(result.step_id), result.stage_times_s
        waited_s = now_s - max(step.planned_at_s, self.last_answer_s)
        duration_s = max([end - start for start, end in times]) if times else waited_s
        self.last_answer_s = now_s
        self.outcomes.computed(step, duration_s)
        if not step.plan.adapter_load_s:  # it was not the step's own time
            self._learn(step, duration_s, result.drafting_s)
        if self.requests.trials or self.faults.num_failures_in_a_row:
            self.faults.succeeded(step)
        if rows := self.outcomes.apply(step, result):
            out.append(Emit(tuple(rows)))
        if result.drafts_offered:
            self.speculation.answered(step.plan, result, self.requests.by_id)

    def _learn(self, step: InFlight, duration_s: float, drafting_s: float) -> None:
        """Learn step times from a finished step, for the plans of later steps."""
        shape = step.shape if self.tier is None else self.tier.shape_of(step)
        if self.builder.budget.learns:
            self.builder.budget.observe(shape, duration_s, drafting_s)
        if self.cost_model is not None:
            self.cost_model.observe(shape, duration_s)

    def _step_failed(self, event: StepFailed, out: list[Instruction]) -> None:
        step = self._pop_answered(event.step_id)
        self.last_answer_s = self.requests.now_s
        out += Emit.of(self.faults.step_failed(step, event.message))

    def _pop_answered(self, step_id: int) -> InFlight:
        """Steps are answered in order; the oldest is done with."""
        oldest = self.in_flight[0].plan.step_id if self.in_flight else None
        if step_id != oldest:
            raise ValueError(f"answer to step {step_id}, but the oldest outstanding is {oldest}")
        step = self.in_flight.popleft()
        if step.pinned:
            self.requests.running.block_manager.free(step.pinned)
        if step.host_blocks or step.swapped_out:
            self.requests.running.swap.answered(step.host_blocks, bool(step.swapped_out))
        return step

    def _pipeline_lost(self, event: PipelineLost, out: list[Instruction]) -> None:
        steps = list(self.in_flight)
        self.in_flight.clear()
        if self.tier is not None:
            self.tier.lost(event.tier)
        out += Emit.of(self.faults.pipeline_lost(steps, event))

    def _reconfigure(self, event: Reconfigure, out: list[Instruction]) -> None:
        config = self.config.with_changes(event.changes)
        # Everything that may refuse its options comes before anything changes.
        old, policy, budget = self.config, self.policy, self.builder.budget
        admission = self.limits.admission
        if config.differs(old, "policy", "policy_options", "max_requests"):
            policy = build_policy(config)
        if config.differs(old, *_BUDGET_KEYS):
            budget = build_budget(config, self.cost_model)
        if config.differs(old, *_ADMISSION_KEYS):
            admission = build_admission(config, self.cost_model)
        order = order_name(config, policy)
        is_by_ttft = order == "deadline" and config.differs(old, "ttft_s")
        if order != self.order or is_by_ttft or config.differs(old, "order_options"):
            self.requests.switch_order(order, config)
        self.config, self.order, self.policy = config, order, policy
        if config.max_running_per_tenant != old.max_running_per_tenant:  # they waited for the old
            self.requests.waiting.unpark_all(self.requests.now_s)
        self.requests.use(config)
        self.limits.config, self.limits.admission = config, admission
        self.builder = StepBuilder(self.requests, budget, admission, policy.reserve, self.tier)

    def _tier_event(self, event: TierEvent, out: list[Instruction]) -> None:
        if self.tier is not None:
            self.tier.handle(event)
        elif not isinstance(event, PeerEvent):
            raise ValueError(f"{type(event).__name__}, but there is no second tier")

    # ---- planning ---------------------------------------------------------------------

    def _plan(self, out: list[Instruction]) -> None:
        """Plan greedily while the pipeline has room and there is work."""
        in_flight, requests, speculation = self.in_flight, self.requests, self.speculation
        if requests.trials:
            self.faults.drop_settled()
        while len(in_flight) < requests.depth and requests.by_id:
            if requests.trials and in_flight:
                return  # one step at a time, so that a fault is that step's own
            if in_flight and speculation.is_on and speculation.holds_back(self.builder):
                return
            step = self._plan_one()
            if step is None:
                return
            self.num_steps += 1
            in_flight.append(step)
            if self.cost_model is not None:
                step.predicted_s = self.cost_model.step_s(step.shape)
            out.append(Execute(step.plan, step.predicted_s))

    def _plan_one(self) -> InFlight | None:
        """The next step; None if nothing can run now."""
        builder = self.builder
        builder.begin(self.num_steps)
        if not self.requests.trials:
            self.policy.plan(builder)
        elif self.faults.plan_turn(builder, self.policy.plan):
            return builder.build()
        if builder.contents.is_empty and not self.in_flight:
            self.num_forced_steps += 1
            plan_anything(builder)
        if self.speculation.is_on:
            self.speculation.extend(builder)
        return builder.build()
