"""The content of a step under construction: what a policy may read, and the resulting plan."""

from __future__ import annotations

from collections.abc import Sequence

from actors.scheduling.interfaces import Admission, TokenBudget
from actors.scheduling.lifecycle import LiveRequests
from actors.scheduling.microbatch import prefill_share
from actors.scheduling.plan import Slice, StepPlan, StepShape
from actors.scheduling.second_tier import SecondTier
from actors.scheduling.state import Drafted, InFlight, RequestState

_make = tuple.__new__  # a NamedTuple without the Python-level constructor: once per token
LEAST_TRIAL_TOKENS, MOST_TRIAL_TOKENS = 64, 2048  # of a step, whatever the budget


class StepContents:
    """The content so far; `StepBuilder` adds to it."""

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
        self.token_budget = 0  # of the last step in which prefill was possible
        self._uniform = self.config.micro_batches == "uniform" and self.config.num_stages > 1
        self.clear(0)

    def clear(self, step_id: int) -> None:
        self.step_id = step_id
        self.num_tokens = 0
        self.num_decodes = 0
        self.decode_context_tokens = 0
        self._decode_slices: list[Slice] = []
        self._decode_states: list[RequestState] = []
        self._prefills: dict[RequestState, int] = {}  # tokens of each, in order of addition
        self._drafted: dict[RequestState, Drafted] = {}
        self._drafts: list[tuple[int, tuple[int, ...]]] = []
        self._fed: list[tuple[int, int, int]] = []
        self._trimmed: list[tuple[int, int]] = []
        self._new_blocks: dict[int, list[int]] = {}
        self._starting: list[RequestState] = []
        self.is_trial = False  # whether the step has only suspects

    # ---- reads of policies ------------------------------------------------------------

    @property
    def now_s(self) -> float:
        return self._requests.now_s

    @property
    def empty(self) -> bool:
        return self.num_tokens == 0

    @property
    def shape(self) -> StepShape:
        prefills: tuple[tuple[int, int], ...] = ()
        if self._prefills:
            prefills = tuple([(s.num_computed_tokens - n, n) for s, n in self._prefills.items()])
        if self._drafted:
            sizes = [(s, 1 + d.num_drafts) for s, d in self._drafted.items()]
            prefills = (*[(s.num_computed_tokens - n, n) for s, n in sizes], *prefills)
        return _make(
            StepShape,
            (self.num_decodes, self.decode_context_tokens, prefills, self._beside_move),
        )

    @property
    def _beside_move(self) -> bool:
        return self._tier is not None and self._tier.is_moving

    @property
    def room(self) -> int:
        """Tokens that still fit the stages' buffers."""
        return self.config.max_step_tokens - self.num_tokens

    @property
    def num_slices(self) -> int:
        return len(self._decode_slices) + len(self._drafted) + len(self._prefills)

    @property
    def decodes_alone(self) -> list[RequestState]:
        """Decodes of the step that are in no other step in flight, so that all tokens are known."""
        return [s for s in self._decode_states if s.in_flight == 1]

    @property
    def decoding(self) -> Sequence[RequestState]:
        """Running requests whose prompt is planned to its end, best rank first."""
        return self._running.decoding

    @property
    def prefilling(self) -> Sequence[RequestState]:
        """Running requests with prompt (or recomputation) left, best rank first."""
        return self._running.prefilling

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

    @property
    def wants_prefill(self) -> bool:
        """Whether any prompt, running or waiting, has tokens left."""
        return bool(self._running.prefilling or self._requests.waiting.num_requests)

    def tokens_left(self) -> int:
        """Prefill tokens that the budget allows in addition. Never negative."""
        budget = self.budget.num_tokens(self.shape, self._requests)
        if self._uniform:
            share = prefill_share(self._requests, self.config.depth, self.num_tokens)
            budget = min(budget, share)
        self.token_budget = budget
        return max(0, min(budget - self.num_tokens, self.room))

    def trial_tokens(self) -> int:
        """Prefill tokens of a step of suspects: as many as the budget allows beside all decodes.

        The decodes of other requests wait meanwhile, and get the next step.
        """
        decoding = self._running.decoding
        context = sum([state.num_computed_tokens + 1 for state in decoding])
        shape = StepShape(len(decoding), context, (), self._beside_move)
        self.token_budget = self.budget.num_tokens(shape, self._requests)
        most = min(self.token_budget - len(decoding), MOST_TRIAL_TOKENS)
        return max(most, LEAST_TRIAL_TOKENS)

    def runnable_prefills(self) -> list[RequestState]:
        """Admitted requests with known tokens left, best rank first (those of this step too)."""
        limit, step_id = self.config.chunks_per_request, self.step_id
        trusted = [s for s in self._running.prefilling if s.suspicion is None]
        return [s for s in trusted if s.in_flight < limit or s.step_id == step_id]

    def runnable_decodes(self) -> list[RequestState]:
        limit = self.config.steps_per_request
        return [
            s
            for s in self._running.decoding
            if s.in_flight < limit and s.num_computed_tokens < s.end and s.suspicion is None
        ]

    def head(self) -> RequestState | None:
        """The next waiting request; requests that wait for a fetch are set aside."""
        if self._tier is not None:
            self._tier.fetch_ahead()
        return self._requests.waiting.head(self._requests.now_s)

    # ---- the result -------------------------------------------------------------------

    def build(self) -> InFlight | None:
        """The plan, if it has work; it carries pending releases and copies."""
        if self.num_tokens == 0:
            return None
        running, swap = self._running, self._running.swap
        slices: list[Slice] = self._decode_slices
        sampled, partial = self._decode_states, []
        shape = self.shape
        num_decode_tokens = shape.num_decodes
        for state, drafted in self._drafted.items():
            length = 1 + drafted.num_drafts
            num_decode_tokens += length
            start = state.num_computed_tokens - length
            slices.append(Slice(state.request_id, start, length, True))
            sampled.append(state)
        for state, count in self._prefills.items():
            end = state.num_computed_tokens
            samples = end == state.num_tokens and state.request.pooling is None
            slices.append(Slice(state.request_id, end - count, count, samples))
            if samples:
                sampled.append(state)
            else:
                partial.append((state, end))
        for state in self._starting:
            state.on_stages = True
        plan = StepPlan(
            step_id=self.step_id,
            slices=tuple(slices),
            released=tuple(running.released),
            swap_out=tuple(swap.swap_out),
            swap_in=tuple(swap.swap_in),
            copies=tuple(running.copies),
            started=tuple([state.introduce() for state in self._starting]),
            new_blocks=tuple([(i, tuple(blocks)) for i, blocks in self._new_blocks.items()]),
            fed=tuple(self._fed),
            trimmed=tuple(self._trimmed),
            drafts=tuple(self._drafts),
        )
        step = InFlight(
            plan=plan,
            sampled=sampled,
            partial=partial,
            shape=shape,
            num_tokens=self.num_tokens,
            num_decode_tokens=num_decode_tokens,
            pinned=[source for source, _ in running.copies],
            host_blocks=swap.returned if swap.is_pending else (),
            swapped_out=swap.swapped_out if swap.is_pending else (),
            planned_at_s=self._requests.now_s,
            drafted=tuple(self._drafted.values()),
        )
        running.released, running.copies = [], []
        if swap.is_pending:
            swap.clear()
        return step
