"""A driver of a core over `fake_stages` that distrusts every plan and every answer."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from actors.scheduling.build import build_core
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.core import Core
from actors.scheduling.events import (
    Abort,
    ClearTier,
    Emit,
    Event,
    Execute,
    Fetch,
    Instruction,
    KVMove,
    Moved,
    Output,
    PipelineLost,
    Refuse,
    StepDone,
    StepFailed,
    Submit,
    WakeAt,
)
from actors.scheduling.memory.block_manager import BlockManager
from actors.scheduling.plan import NOT_FINITE, Slice, StepPlan
from actors.scheduling.request import FinishReason, Request
from actors.scheduling.state import RequestStatus
from actors.scheduling.step import StepBuilder
from actors.scheduling.validation import validate
from tests.actors.scheduling.fake_stages import FakeStages, expected_output

REBUILT_AFTER = 4  # failed steps in a row: the engine then gives its stages up (`Recovery`)


def is_shared(manager: BlockManager, block: int) -> bool:
    """Another request holds the block too, or may come to: it must not be written."""
    return manager._references[block] > 1 or block in manager._digest_of


@dataclass
class Caller:
    """What one client has been told."""

    request: Request
    tokens: list[int]
    finish: FinishReason | None = None
    aborted: bool = False
    refused: Refuse | None = None
    first: Output | None = None
    pooled: tuple[float, ...] = ()


class Driver:
    """A core, its stages and its callers; every event goes through `send`."""

    def __init__(self, config: SchedulerConfig, core: Core | None = None) -> None:
        self.config = config
        self.core = core or build_core(config)
        self.held_back = False  # the next step, until tokens in flight are known
        self._record_holds_back()
        self.stages = FakeStages(config)
        self.callers: dict[int, Caller] = {}
        self.outstanding: deque[StepPlan] = deque()
        self.moves: deque[KVMove] = deque()
        self.plans: list[StepPlan] = []
        self.log: list[tuple[float, Event, list[Instruction]]] = []
        self.now_s = 0.0
        # By request: which of its slices raise, and which lose the pipeline
        self.poison: dict[int, Callable[[Slice], bool]] = {}
        self.killers: dict[int, Callable[[Slice], bool]] = {}
        self.num_kills: Counter[int] = Counter()
        self.failures = 0
        self.wake_at_s: float | None = None

    # ---- events -----------------------------------------------------------------------

    def send(self, event: Event, after_s: float = 0.01) -> list[Instruction]:
        self.now_s += after_s
        instructions = self.core.handle(event, self.now_s)
        self.log.append((self.now_s, event, instructions))
        validate(self.core)
        for instruction in instructions:
            if isinstance(instruction, Execute):
                self._check_plan(instruction.plan)
                self._check_trial(instruction.plan)
                self._check_first_come_first_served(instruction.plan)
                self._check_budget(instruction.plan)
                self.outstanding.append(instruction.plan)
                self.plans.append(instruction.plan)
            elif isinstance(instruction, Emit):
                told = [output.request_id for output in instruction.outputs]
                assert len(told) == len(set(told)), "two outputs of one request in one message"
                for output in instruction.outputs:
                    self._deliver(output)
            elif isinstance(instruction, Refuse):
                caller = self.callers[instruction.request_id]
                assert caller.refused is None
                assert caller.finish is None
                caller.refused = instruction
            elif isinstance(instruction, WakeAt):
                self.wake_at_s = instruction.time_s
            elif isinstance(instruction, KVMove):
                self._check_move(instruction)
                self.moves.append(instruction)
        self._check_no_decode_skipped()
        return instructions

    def _check_move(self, move: KVMove) -> None:
        """A move may be carried out at once, before the plans that are under way."""
        if isinstance(move, Fetch):
            swap = self.core.requests.running.swap
            pairs = [*swap.swap_out, *(pair for plan in self.outstanding for pair in plan.swap_out)]
            filled = {block for block, _ in move.blocks}
            assert not filled & {block for block, _ in pairs}, "KV is fetched over KV to be copied"

    def submit(self, request: Request) -> None:
        self.callers[request.request_id] = Caller(request, list(request.output))
        self.send(Submit(request))

    def abort(self, request_id: int) -> None:
        caller = self.callers.get(request_id)
        if caller is not None:
            caller.aborted = True
        self.send(Abort(request_id))

    def answer(self) -> None:
        plan = self.outstanding[0]
        killers = _fatal(self.killers, plan)
        if killers:
            self.num_kills.update(killers)
            assert max(self.num_kills.values()) <= 3, "a fourth loss by one request"
            self.lose()
            return
        if _fatal(self.poison, plan):
            self.fail(applied=True)
            if self.core.num_failures_in_a_row >= REBUILT_AFTER:
                self.lose(steps_are_suspect=False)
            return
        self.outstanding.popleft()
        self.send(StepDone(self.stages.run(plan)))

    def fail(self, applied: bool) -> None:
        plan = self.outstanding.popleft()
        self.failures += 1
        self.stages.fail(plan, applied)
        self.send(StepFailed(plan.step_id, "kernel panic"))

    def overflow(self, request_id: int) -> None:
        """The last token that this request draws in the next step is not finite."""
        plan = self.outstanding.popleft()
        result = self.stages.run(plan)
        extra = dict(result.extra_tokens)
        if request_id in extra:
            extra[request_id] = (*extra[request_id][:-1], NOT_FINITE)
            result = replace(result, extra_tokens=tuple(extra.items()))
        else:
            tokens = [(i, NOT_FINITE if i == request_id else token) for i, token in result.tokens]
            result = replace(result, tokens=tuple(tokens))
        self.send(StepDone(result))

    def answer_move(self, which: int = 0, most: int = 1 << 30, after_s: float = 0.01) -> None:
        """Carry a move out, as late as can be: what it holds must be as it was until now.

        most: blocks that are done of it.
        """
        clears = [i for i, move in enumerate(self.moves) if isinstance(move, ClearTier)]
        if clears and which >= clears[0]:  # it is behind those before it, and others behind it
            which = 0
        move = self.moves[which]
        del self.moves[which]
        num_blocks, changes = self.stages.stores.move(move, most, self.stages.slots)
        self.send(Moved(move.move_id, num_blocks, changes), after_s)

    def lose(self, steps_are_suspect: bool = True) -> None:
        self.outstanding.clear()
        self.moves.clear()
        self.failures += 1
        self.send(PipelineLost(self.stages.lose(), steps_are_suspect))

    def drain(self, limit: int = 20_000) -> None:
        """Answer everything until nothing is left."""
        for _ in range(limit):
            if self.outstanding:
                self.answer()
            elif self.moves:
                self.answer_move()
            else:
                break
        assert self.core.is_idle, f"stuck: {list(self.core.requests.by_id.values())[:5]}"

    # ---- checks -----------------------------------------------------------------------

    def _check_trial(self, plan: StepPlan) -> None:
        """Suspects are computed with suspects only, with nothing else in flight."""
        states = [self.core.requests.by_id[part.request_id] for part in plan.named_slices]
        suspects = [state for state in states if state.suspicion is not None]
        assert len(suspects) in (0, len(states)), "a suspect beside others"
        assert not (suspects and len(self.core.in_flight) > 1), "a suspect's step is not alone"

    def _check_first_come_first_served(self, plan: StepPlan) -> None:
        """Of one tenant, no request starts before those that came earlier."""
        core = self.core
        order = core.order
        started = [core.requests.by_id[start.request_id] for start in plan.started]
        if order != "fcfs" or any(state.suspicion or state.num_preemptions for state in started):
            return
        moves = () if core.tier is None else core.tier.moves.values()
        fetching = {state.request_id for move in moves for state in move.waiting}
        waiting = [
            state
            for state in core.requests.by_id.values()
            if state.status is RequestStatus.WAITING
            and not (state.admitted or state.suspicion or state.request.group)
            and state.request_id not in fetching
        ]
        for state in started:
            for other in waiting:
                same = other.request.tenant == state.request.tenant
                is_overtaken = same and other.order_key < state.order_key
                assert not is_overtaken, f"{state} started before {other}"

    def _record_holds_back(self) -> None:
        """Its last answer; to ask once more is another look, which may price drafts anew."""
        holds_back = self.core.speculation.holds_back

        def recorded(step: StepBuilder) -> bool:
            self.held_back = holds_back(step)
            return self.held_back

        self.core.speculation.holds_back = recorded  # type: ignore[method-assign]

    def _check_no_decode_skipped(self) -> None:
        """With room in the pipeline no request is left that could decode in memory it holds."""
        core = self.core
        overlaps = self.config.steps_per_request > 1 and bool(self.outstanding)
        waits = overlaps and self.held_back
        if len(self.outstanding) < core.requests.depth and not (core.requests.trials or waits):
            for state in self.core.requests.decoding:
                if state.is_background and self.core.requests.are_mixed:
                    continue
                ready = state.in_flight < self.config.steps_per_request
                last = max(state.num_computed_tokens, state.num_tokens - 1)
                holds_memory = last < state.capacity
                assert not (ready and holds_memory and state.num_computed_tokens < state.end), state

    def _check_budget(self, plan: StepPlan) -> None:
        """Stall-free policies: chunks never exceed the budget (but see isolation, progress)."""
        core = self.core
        stall_free = ("sarathi", "fair", "deadline", "shortest_first")
        dynamic = "chunks" in core.config.policy_options
        by_time = core.config.budget in ("auto", "profiled", "adaptive")
        tried = self.failures or core.requests.trials
        excused = dynamic or by_time or tried or core.num_forced_steps
        if core.config.policy in stall_free and not excused:
            decodes = sum(
                part.num_tokens == 1 and part.samples and part.start > 0
                for part in plan.named_slices
            )
            drafts = dict(plan.drafts)
            goes_back = core.config.num_saved_states is not None
            for part in plan.named_slices:
                num_known = part.num_tokens - len(drafts.get(part.request_id, ()))
                if part.request_id in drafts:
                    decodes += num_known
                elif num_known > 1 and goes_back and part.samples:
                    state = core.requests.by_id[part.request_id]
                    decodes += num_known * (part.start >= state.num_prompt_tokens)
            beside = 1 if core.requests.num_background else 0  # that goes on all the same
            assert plan.num_tokens <= max(core.config.token_budget, decodes) + beside

    def _check_plan(self, plan: StepPlan) -> None:
        core, size = self.core, self.config.block_size
        assert plan.slices, "an empty step"
        ids = [part.request_id for part in plan.named_slices]
        assert len(ids) == len(set(ids)), "two slices of one request in one step"
        assert plan.num_tokens <= self.config.max_step_tokens
        if self.config.steps_per_request == 1:
            # the next slice behind one that samples depends on the token that must come back
            overlap = self.config.overlap_chunks
            awaited = {
                part.request_id
                for other in self.outstanding
                for part in other.named_slices
                if part.samples or not overlap
            }
            assert not awaited & set(ids), "a request in two steps at once"
        pinned = {block for step in core.in_flight for block in step.pinned}
        for part in plan.named_slices:
            state = core.requests.by_id[part.request_id]
            first, last = part.start // size, (part.start + part.num_tokens - 1) // size
            for block in state.block_table[first : last + 1]:
                # (a block pinned for a copy at the start of a step may be written behind it)
                shared = is_shared(core.requests.running.block_manager, block)
                assert not shared or block in pinned, "a write to a shared block"
                for other in core.requests.by_id.values():
                    if other is not state:
                        assert block not in other.block_table, "two owners of a block being written"
            assert last < len(state.block_table), "no block for a token"

    def _deliver(self, output: Output) -> None:
        caller = self.callers[output.request_id]
        assert caller.finish is None, "an output after the end"
        assert caller.refused is None
        assert output.index == len(caller.tokens), "a token lost or doubled"
        assert output.tokens or output.finish_reason is not None
        if caller.first is None and output.tokens:
            caller.first = output
        caller.tokens += output.tokens
        caller.finish = output.finish_reason
        if output.pooled:
            caller.pooled = output.pooled
        self._check_tokens(caller, output)

    def _check_tokens(self, caller: Caller, output: Output) -> None:
        request = caller.request
        if request.pooling is not None:
            assert not caller.tokens
            return
        tokens, reason = expected_output(request, self.config.max_model_len)
        assert caller.tokens == tokens[: len(caller.tokens)], "wrong tokens"
        if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert caller.tokens == tokens
            assert output.finish_reason is reason
        if output.finish_reason is FinishReason.ABORT:
            assert caller.aborted
        if output is caller.first and request.sampling.prompt_logprobs is not None:
            found = [entry and entry.token for entry in output.prompt_logprobs]
            assert found == [None, *request.prompt[1:]]

    def check_everyone_finished(self, but_errors: Sequence[int] = ()) -> None:
        for caller in self.callers.values():
            if caller.refused is None:
                assert caller.finish is not None, f"{caller.request.request_id} never ended"
                if caller.finish is FinishReason.ERROR:
                    assert caller.request.request_id in but_errors
        waiting, running = self.core.requests.waiting, self.core.requests.running
        assert running.block_manager.num_free == self.config.num_blocks
        assert running.swap.host.num_free == self.config.num_host_blocks
        assert len(waiting.groups) == 0
        assert not waiting.parked
        assert not self.core.trials
        assert waiting.order.peek(self.now_s) is None


def _fatal(deadly: dict[int, Callable[[Slice], bool]], plan: StepPlan) -> set[int]:
    """The requests whose slices of this plan bring it down."""
    return {
        part.request_id
        for part in plan.named_slices
        if part.request_id in deadly and deadly[part.request_id](part)
    }
