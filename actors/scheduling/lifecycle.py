"""All live requests, and their transitions between the waiting queue and the running requests.

Policies have no access to it: they use the `StepBuilder`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from actors.scheduling.class_view import ClassView
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.interfaces import EngineView, StepTimePredictor, StepView, pending_tokens
from actors.scheduling.memory.running import RunningRequests
from actors.scheduling.plan import StepPlan, StepShape
from actors.scheduling.queue import build_order
from actors.scheduling.queue.waiting import WaitingQueue
from actors.scheduling.state import Fate, RequestState, RequestStatus

_RUNNING = RequestStatus.RUNNING
_LONG_S = 0.005  # a step, beside which the time is short that a stage without a plan stands still

BACKLOGGED = 8  # steps; one alone is as long as tile edges make it


class LiveRequests:
    """The queue and the running requests together. Implements `interfaces.EngineView`."""

    def __init__(
        self,
        config: SchedulerConfig,
        order: str,
        cost_model: StepTimePredictor | None,
        in_flight: Sequence[StepView] = (),
    ) -> None:
        """in_flight: the core's own queue of steps, for reading."""
        self.cost_model = cost_model
        self.waiting = WaitingQueue(config, build_order(order, config))
        self.running = RunningRequests(config, cost_model)
        self.by_id: dict[int, RequestState] = {}  # every request not ENDED
        self.now_s = 0.0
        self.trials: deque[list[RequestState]] = deque()  # suspects; the first group is being tried
        self.in_flight = in_flight
        self.num_background = 0  # of those, see `Request.priority`
        self.num_preemptions = 0
        self.num_arrived = 0
        self.num_adapter_loads = 0  # of adapters, under way
        self.backlogged = deque[tuple[int, StepShape]](maxlen=BACKLOGGED)
        self.tokens_per_s = 0.0  # running mean of computed tokens, for retry_after_s
        # The lists of `running`, which change in place
        self.decoding = self.running.decoding
        self.prefilling = self.running.prefilling
        self.use(config)

    def use(self, config: SchedulerConfig) -> None:
        """Apply changed settings."""
        self.config = config
        self.waiting.config = self.running.config = self.running.swap.config = config
        self.waiting.order.use(config)
        self.running.block_manager.version += 1  # what lacked memory may have it by these

    def prefill_s(self, begin: int, num_tokens: int) -> float:
        """Predicted time to compute so many tokens of a prompt from `begin` on, alone."""
        if self.cost_model is not None:
            return self.cost_model.step_s(StepShape(prefills=((begin, num_tokens),)))
        return num_tokens / self.tokens_per_s if self.tokens_per_s else math.inf

    def adapters_load(self, number: int) -> None:
        self.num_adapter_loads = number

    @property
    def are_mixed(self) -> bool:
        """Whether background and live ones are here."""
        return 0 < self.num_background < len(self.by_id)

    @property
    def depth(self) -> int:
        """Steps that may be outstanding: none is planned behind a long one of the background, as a
        live request that comes would wait for both."""
        config = self.config
        if self.in_flight and self.is_background:
            predicted_s = self.in_flight[-1].predicted_s
            if predicted_s is not None and predicted_s > _LONG_S:
                return min(config.depth, config.num_stages)
        return config.depth

    # ---- EngineView -------------------------------------------------------------------

    @property
    def is_background(self) -> bool:
        return 0 < self.num_background == len(self.by_id)

    @property
    def queue(self) -> Sequence[RequestState]:
        return [s for s in self.by_id.values() if s.status is RequestStatus.WAITING]

    @property
    def num_waiting(self) -> int:
        return self.waiting.num_requests

    @property
    def num_in_flight(self) -> int:
        return len(self.in_flight)

    @property
    def num_waiting_tokens(self) -> int:
        return self.waiting.num_tokens

    @property
    def num_shared_tokens(self) -> int:
        return self.waiting.num_shared_tokens

    def found_by(self, priority: int, tenant: str | None = None) -> EngineView:
        kind = None if priority < 0 or not self.num_background else False
        has_cap = self.config.max_running_per_tenant is not None
        held = self.waiting.held_back(tenant, kind) if has_cap and tenant is not None else (0, 0)
        return self if kind is None and not held[0] else ClassView(self, kind, *held)

    def knows(self, request_id: int) -> bool:
        return request_id in self.by_id

    def num_waiting_of(self, tenant: str) -> int:
        return self.waiting.waiting_of.get(tenant, 0)

    def cap_of(self, tenant: str, is_background: bool | None = None) -> tuple[int | None, int]:
        """is_background: of that class."""
        return self.config.max_running_per_tenant, self.waiting.num_of(tenant, is_background)

    def num_held_of(self, request_id: int) -> int:
        state = self.by_id[request_id]
        return self.running.num_held_of(state, self.waiting.donor(state))

    @property
    def num_free_blocks(self) -> int:
        return self.running.block_manager.num_free

    @property
    def num_blocks(self) -> int:
        return self.config.num_blocks

    @property
    def block_size(self) -> int:
        return self.config.block_size

    def head(self) -> RequestState | None:
        """The next request to start."""
        return self.waiting.head(self.now_s)

    # ---- waiting -> running -----------------------------------------------------------

    def add(self, state: RequestState) -> None:
        """Queue a new request."""
        state.cacheable = (
            self.config.prefix_cache
            and state.request.sampling.prompt_logprobs is None
            and state.request.pooling in (None, "last")  # other poolings need every hidden state
        )
        self.by_id[state.request_id] = state
        self.num_arrived += 1
        self.num_background += state.is_background
        self.waiting.add(state, self.now_s)

    def start(self, state: RequestState, first_chunk: int, reserve: bool) -> bool:
        """Start the head of the queue (or a suspect); False, and no change, if it must wait."""
        if not self.running.start(state, first_chunk, reserve, self.waiting.donor(state)):
            return False
        num_shared = state.num_computed_tokens // self.config.block_size
        blocks = state.block_table[:num_shared]
        state.state_row = self.running.block_manager.use_state(state.request_id, blocks)
        self.waiting.started(state)
        self.waiting.pop(state)
        return True

    def settle_states(self, plan: StepPlan, *, is_done: bool) -> None:
        """The step that saves these states has been answered. Those of a request that runs no more
        may come from a step before that failed; of a private one they are not kept."""
        states = self.running.block_manager.states
        if states is None:
            return
        for request_id, _, row in plan.saved_states:
            state = self.by_id.get(request_id)
            keeps = state is not None and not state.is_private and state.status is _RUNNING
            states.settle(row, is_saved=is_done and keeps)

    def kept_back(self, remaining: int, in_step: bool) -> int:
        """Of a prompt's remaining tokens those that its last chunk, a step of its own, shall have,
        so that the KV before them is saved beside that; none where another prompt would make that
        step a long one. in_step: the step has a chunk of it already."""
        last = self.config.last_chunk
        if not last or len(self.prefilling) > 1 or self.waiting.num_requests:
            return 0
        if in_step:
            return min(remaining, last)
        return last if remaining >= 2 * last else 0

    def can_spare(self, num_blocks: int) -> bool:
        """Whether so many blocks are free beside those of all prompts, waiting ones included.
        Where live requests are, those of the background do not count: they yield."""
        view = self.found_by(priority=0) if self.are_mixed else self
        num_prompts = view.num_waiting + len(view.prefilling)
        if num_prompts:
            size = self.config.block_size
            num_blocks += num_prompts + pending_tokens(view) // size
            num_blocks += int(self.config.watermark * self.config.num_blocks)
        return self.running.block_manager.can_allocate(num_blocks)

    def grow(self, state: RequestState, num_tokens: int, step_id: int) -> list[int] | None:
        """Append blocks until `num_tokens` fit, preempting later requests; None if it must wait.

        Requests already in the step being planned are never preempted.
        """
        running, blocks = self.running, self.running.block_manager
        need = -(-num_tokens // self.config.block_size) - len(state.block_table)
        while not blocks.can_allocate(need):
            enough_returns = blocks.num_free + running.num_finishing_blocks >= need
            victim = None if enough_returns else running.victim(state, step_id)
            if victim is None:
                running.claim(state)
                return None
            self.preempt(victim)
        return running.grow(state, need)

    def put_back(self, waiting: Sequence[RequestState], may_look: bool) -> None:
        """Put requests that waited for a fetch back into the queue. may_look: for another one."""
        for state in reversed(waiting):  # each is restored ahead of its peers
            if state.status is RequestStatus.WAITING:
                state.tier_asked = state.tier_asked or not may_look
                self.waiting.put_back(state, self.now_s)

    def forget_cached(self) -> None:
        """Nothing that has been computed by now is found any longer; requests keep what they
        hold."""
        self.running.block_manager.forget()
        for state in self.by_id.values():
            if state.block_table or state.host_blocks:
                state.is_private = True
                state.slow_path_at = 0  # its next token completes no block

    # ---- running -> waiting or ended --------------------------------------------------

    def preempt(self, state: RequestState) -> None:
        """Return it to the queue; its tokens stay, its KV is recomputed or swapped."""
        state.num_preemptions += 1
        self.num_preemptions += 1
        self.stop(state, Fate.QUEUE)

    def stop(self, state: RequestState, fate: Fate) -> None:
        """Stop planning a RUNNING request; its `Fate` is carried out after the steps in flight."""
        self.running.stop(state)
        if (states := self.running.block_manager.states) is not None:
            states.used(state.request_id)
        self.waiting.stopped(state, self.now_s)
        state.fate = fate
        if state.in_flight == 0:
            self.drained(state)

    def drained(self, state: RequestState) -> None:
        """Carry out the fate of a FINISHING request: no step in flight uses it."""
        kept = self.running.release(state, state.fate is Fate.QUEUE and not state.discard)
        state.discard = False
        if state.fate is Fate.END:
            self.forget(state)
            return
        if not kept:
            state.num_computed_tokens = 0
        state.status = RequestStatus.WAITING
        state.tier_asked = False
        self.waiting.restore(state, self.now_s)

    def forget(self, state: RequestState) -> None:
        """End a request that holds nothing on the device."""
        state.status = RequestStatus.ENDED
        del self.by_id[state.request_id]
        self.num_background -= state.is_background
        if state.host_blocks:
            self.running.swap.drop(state)
        self.waiting.ended(state, self.now_s)

    def drop_waiting(self, state: RequestState) -> None:
        """End a WAITING request."""
        self.waiting.remove(state)
        self.forget(state)
        # A request that was set aside may now have its place.
        self.waiting.unpark(state.request.tenant, self.now_s)

    def end(self, state: RequestState) -> None:
        """End the request, in whatever state it is."""
        if state.status is RequestStatus.WAITING:
            self.drop_waiting(state)
        elif state.status is RequestStatus.RUNNING:
            self.stop(state, Fate.END)
        elif state.status is RequestStatus.FINISHING:
            state.fate = Fate.END

    # ---- another order ----------------------------------------------------------------

    def switch_order(self, name: str, config: SchedulerConfig) -> None:
        """Switch the order; requests keep their state."""
        order = build_order(name, config)
        self.waiting.switch_order(order, self.by_id.values(), self.now_s)
        self.running.resort()
