"""What a step under construction holds, and the plan that it becomes."""

from __future__ import annotations

from collections.abc import Sequence

from actors.scheduling.lifecycle import LiveRequests
from actors.scheduling.memory.saved_states import SavedStates
from actors.scheduling.plan import SliceRow, StepPlan, StepShape
from actors.scheduling.state import Drafted, InFlight, RequestState

_make = tuple.__new__  # a NamedTuple without the Python-level constructor


class StepContents:
    """The slices so far, and what the stages must be told with them. `StepBuilder` adds to it."""

    __slots__ = (
        "decode_context_tokens",
        "decode_slices",
        "decode_states",
        "drafted",
        "drafts",
        "drafts_asked",
        "fed",
        "new_blocks",
        "num_decodes",
        "num_tokens",
        "prefills",
        "starting",
        "step_id",
        "trimmed",
    )

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self.num_tokens = 0
        # Decodes of one token
        self.num_decodes = 0
        self.decode_context_tokens = 0
        self.decode_slices: list[SliceRow] = []
        self.decode_states: list[RequestState] = []
        # Decodes of several tokens
        self.drafted: dict[RequestState, Drafted] = {}
        self.drafts: list[tuple[int, tuple[int, ...]]] = []
        self.drafts_asked: list[tuple[int, int]] = []
        self.prefills: dict[RequestState, int] = {}  # tokens of each, in order of addition
        # As in `StepPlan`
        self.starting: list[RequestState] = []
        self.new_blocks: dict[int, tuple[int, ...]] = {}
        self.fed: list[tuple[int, int, int]] = []
        self.trimmed: list[tuple[int, int]] = []

    @property
    def is_empty(self) -> bool:
        return self.num_tokens == 0

    @property
    def num_slices(self) -> int:
        return len(self.decode_slices) + len(self.drafted) + len(self.prefills)

    @property
    def decodes_alone(self) -> list[RequestState]:
        """Decodes that are in no other step in flight, so that all their tokens are known."""
        alone = [s for s in self.decode_states if s.in_flight == 1]
        if self.drafted:
            alone += [s for s, d in self.drafted.items() if s.in_flight == 1 and not d.num_drafts]
        return alone

    @property
    def num_streams(self) -> int:
        """Decodes, of one token or several."""
        return self.num_decodes + len(self.drafted)

    def shape(self, beside_move: bool) -> StepShape:
        prefills: tuple[tuple[int, int], ...] = ()
        if self.prefills:
            prefills = tuple([(s.num_computed_tokens - n, n) for s, n in self.prefills.items()])
        if self.drafted:
            sizes = [(s, d.num_tokens) for s, d in self.drafted.items()]
            prefills = (*[(s.num_computed_tokens - n, n) for s, n in sizes], *prefills)
        decodes, num_drafted = (self.num_decodes, self.decode_context_tokens), len(self.drafted)
        return _make(StepShape, (*decodes, prefills, beside_move, num_drafted))

    def added_decodes(self, count: int, context_tokens: int) -> None:
        """Count the decodes last appended to `decode_states` and `decode_slices`."""
        self.num_decodes += count
        self.decode_context_tokens += context_tokens
        self.num_tokens += count

    def added_blocks(self, state: RequestState, fresh: Sequence[int]) -> None:
        """Tell the stages of blocks that were appended to its table."""
        request_id = state.request_id
        if state.was_trimmed:
            state.was_trimmed = False
            self.trimmed.append((request_id, len(state.block_table) - len(fresh)))
        if state.on_stages:
            self.new_blocks[request_id] = (*self.new_blocks.get(request_id, ()), *fresh)

    def num_redone_of(self, state: RequestState) -> int:
        """Tokens that its decode computes again."""
        return self.drafted[state].num_redone if state in self.drafted else 0

    def add_redone(self, redone: Drafted) -> None:
        """Add a decode that computes tokens again."""
        self.drafted[redone.state] = redone
        self.num_tokens += redone.num_tokens

    def give_drafts(self, drafted: Drafted, drafts: tuple[int, ...]) -> None:
        """Make one of the decodes, which had none, one with drafts."""
        state = drafted.state
        if state not in self.drafted:
            at = self.decode_states.index(state)
            context = self.decode_slices[at][1] + 1
            del self.decode_states[at], self.decode_slices[at]
            self.num_decodes -= 1
            self.decode_context_tokens -= context
        self.num_tokens += drafted.num_drafts
        self.drafted[state] = drafted
        self.drafts.append((state.request_id, drafts))

    def build(self, requests: LiveRequests, beside_move: bool, adapter_load_s: float) -> InFlight:
        """The plan; it carries the pending releases and copies of `requests`."""
        running, swap = requests.running, requests.running.swap
        states = running.block_manager.states
        slices = self.decode_slices
        sampled, partial = self.decode_states, []
        shape = self.shape(beside_move)
        for state, drafted in self.drafted.items():
            length = drafted.num_tokens
            start = state.num_computed_tokens - length
            slices.append((state.request_id, start, length, True))
            sampled.append(state)
        for state, count in self.prefills.items():
            end = state.num_computed_tokens
            samples = end == state.num_tokens and state.request.pooling is None
            slices.append((state.request_id, end - count, count, samples))
            if samples:
                sampled.append(state)
            else:
                partial.append((state, end))
        saved_states = () if states is None else self._saved(states, requests.config.block_size)
        for state in self.starting:
            state.on_stages = True
        plan = StepPlan(
            step_id=self.step_id,
            slices=tuple(slices),
            released=tuple(running.released),
            swap_out=tuple(swap.swap_out),
            swap_in=tuple(swap.swap_in),
            copies=tuple(running.copies),
            started=tuple([state.introduce() for state in self.starting]),
            new_blocks=tuple(self.new_blocks.items()),
            fed=tuple(self.fed),
            trimmed=tuple(self.trimmed),
            drafts=tuple(self.drafts),
            drafts_asked=tuple(self.drafts_asked),
            saved_states=saved_states,
            adapter_load_s=adapter_load_s,
        )
        step = InFlight(
            plan=plan,
            sampled=sampled,
            partial=partial,
            shape=shape,
            num_tokens=self.num_tokens,
            num_decode_tokens=shape.num_decode_tokens,
            pinned=[source for source, _ in running.copies],
            host_blocks=swap.returned if swap.is_pending else (),
            swapped_out=swap.swapped_out if swap.is_pending else (),
            planned_at_s=requests.now_s,
            drafted=tuple(self.drafted.values()),
        )
        running.released, running.copies = [], []
        if swap.is_pending:
            swap.planned()
        return step

    def _saved(self, states: SavedStates, block_size: int) -> tuple[tuple[int, int, int], ...]:
        """As in `StepPlan`: of prompts that reach their last full block in this step."""
        found = []
        for state, count in self.prefills.items():
            number = (state.num_prompt_tokens - 1) // block_size
            position, end = number * block_size, state.num_computed_tokens
            shares = state.cacheable and not state.is_private
            if shares and end - count < position <= end:
                row = states.save(state.block_hash(number - 1, block_size))
                if row is not None:
                    found.append((state.request_id, position, row))
        for state in self.starting:
            states.used(state.request_id)
        return tuple(found)
