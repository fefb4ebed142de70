"""What a policy may read of the step under construction, and of the requests for it."""

from __future__ import annotations

from collections.abc import Sequence

from actors.scheduling.class_view import ClassView
from actors.scheduling.interfaces import Admission, TokenBudget
from actors.scheduling.lifecycle import LiveRequests
from actors.scheduling.microbatch import prefill_share
from actors.scheduling.plan import StepShape
from actors.scheduling.second_tier import SecondTier
from actors.scheduling.state import RequestState, RequestStatus
from actors.scheduling.step_contents import StepContents


class ReadableStep:
    """The reads of a `StepBuilder`."""

    def __init__(
        self,
        requests: LiveRequests,
        budget: TokenBudget,
        admission: Admission,
        reserve: bool,
        tier: SecondTier | None,
    ) -> None:
        """reserve: allocate KV for a request's maximum length before it starts."""
        self._requests = requests
        self._running = requests.running
        self.config = requests.config
        self.budget = budget
        self.admission = admission
        self.reserve = reserve
        self._tier = tier
        self._uniform = self.config.micro_batches == "uniform" and self.config.num_stages > 1
        self.token_budget = 0  # of the last step in which prefill was possible
        self.begin(0)

    def begin(self, step_id: int) -> None:
        self.contents = StepContents(step_id)
        self.is_trial = False  # whether only suspects may be added
        self._view: LiveRequests | ClassView = self._requests  # what may be added

    @property
    def shape(self) -> StepShape:
        return self.contents.shape(self._beside_move)

    @property
    def _beside_move(self) -> bool:
        return self._tier is not None and self._tier.is_moving

    @property
    def room(self) -> int:
        """Tokens that still fit the stages' buffers."""
        return self.config.max_step_tokens - self.contents.num_tokens

    @property
    def decoding(self) -> Sequence[RequestState]:
        """Running requests whose prompt is planned to its end, best first."""
        return self._running.decoding

    @property
    def prefilling(self) -> Sequence[RequestState]:
        """Running requests with prompt (or recomputation) left, best first."""
        return self._running.prefilling

    @property
    def are_mixed(self) -> bool:
        """Whether background requests and live ones are here."""
        return self._requests.are_mixed

    @property
    def num_running(self) -> int:
        return self._running.num_requests

    @property
    def num_slots_taken(self) -> int:
        """Sequence slots in use, those of FINISHING requests included."""
        return self._running.num_slots_taken

    @property
    def order_preempts(self) -> bool:
        """Whether the head of the queue may take the slot of a running request."""
        return self._requests.waiting.order.preempts

    def goes_before(self, state: RequestState, other: RequestState) -> bool:
        """Whether the order would start `state` before `other`, if both waited."""
        return self._requests.waiting.order.goes_before(state, other)

    @property
    def wants_prefill(self) -> bool:
        """Whether any prompt, running or waiting, has tokens left."""
        return bool(self._running.prefilling or self._requests.waiting.num_requests)

    def tokens_left(self) -> int:
        """Prefill tokens that the budget allows in addition. Never negative."""
        budget = self.budget.num_tokens(self.shape, self._view)
        if self._uniform:
            share = prefill_share(self._view, self.config.depth, self.contents.num_tokens)
            budget = min(budget, share)
        self.token_budget = budget
        return max(0, min(budget - self.contents.num_tokens, self.room))

    def budget_of(self, shape: StepShape) -> int:
        """Tokens that the budget allows a step of this shape, which is not the one so far."""
        self.token_budget = self.budget.num_tokens(shape, self._requests)
        return self.token_budget

    def runnable_prefills(self) -> list[RequestState]:
        """Admitted requests with known tokens left, best first (those of this step too)."""
        limit, step_id = self.config.chunks_per_request, self.contents.step_id
        trusted = [s for s in self._view.prefilling if s.suspicion is None]
        return [s for s in trusted if s.in_flight < limit or s.step_id == step_id]

    def runnable_decodes(self) -> list[RequestState]:
        limit = self.config.steps_per_request
        return [
            s
            for s in self._view.decoding
            if s.in_flight < limit and s.num_computed_tokens < s.end and s.suspicion is None
        ]

    @property
    def is_in_flight(self) -> bool:
        """Whether a step in flight holds any of those that may be added."""
        view = self._view
        return any(s.in_flight for states in (view.decoding, view.prefilling) for s in states)

    @property
    def is_place_coming(self) -> bool:
        """Whether a step in flight frees a slot and memory at its end."""
        return bool(self._running.finishing)

    def draftable(self, states: Sequence[RequestState]) -> Sequence[RequestState]:
        """Those of them that may carry drafts, which lengthen a step: beside live requests no
        background ones."""
        if not self.are_mixed:
            return states
        return [s for s in states if not s.is_background]

    def lacks_place(self, state: RequestState, without: Sequence[RequestState] = ()) -> bool:
        """Whether the request that `head` returned lacks a slot or memory, and no step in flight
        will free any. without: as it would be with these preempted."""
        running = self._running
        if self.is_place_coming:
            return False
        num_running = running.num_requests - len(without)
        donor = self._requests.waiting.donor(state)
        donor = None if donor in without else donor
        return num_running >= self.config.max_requests or not running.could_start(
            state, self.room, self.reserve, without, donor
        )

    def capped(self) -> list[RequestState]:
        """Live requests that are next of their tenants, which are at their cap; best first."""
        live = []
        for parked in self._requests.waiting.parked.values():
            state = next((s for s in parked if s.status is RequestStatus.WAITING), None)
            if state is not None and not state.is_background:
                live.append(state)
        return sorted(live, key=lambda state: state.order_key)
