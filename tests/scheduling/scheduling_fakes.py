"""Stages whose answers can be computed by hand, and a driver that distrusts every plan.

A KV slot holds the hash of all tokens up to its position, so attention over a wrong, stale,
unshared or overwritten block is noticed at once. The next token is a function of that hash, so
the whole output of a request is known in advance, whatever happens in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.scheduling.build import build_core
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.core import Core
from actors.scheduling.events import (
    Abort,
    Emit,
    Event,
    Execute,
    Instruction,
    Output,
    PipelineLost,
    Refuse,
    StepDone,
    StepFailed,
    Submit,
    WakeAt,
)
from actors.scheduling.plan import Slice, StepPlan, StepResult, TokenLogprobs
from actors.scheduling.request import FinishReason, Request

VOCABULARY = 11
GARBAGE = -7  # a token no request may ever receive
ROOT = 17


def extend(prefix: int, token: int) -> int:
    return hash((prefix, token))


def draw(prefix: int, seed: int) -> int:
    return hash((prefix, seed, 23)) % VOCABULARY


def expected_output(request: Request, limit: int) -> tuple[list[int], FinishReason]:
    """Tokens that the request must receive in all, those in `request.output` included."""
    prefix, sampling = ROOT, request.sampling
    for token in request.prompt:
        prefix = extend(prefix, token)
    tokens: list[int] = []
    while True:
        token = draw(prefix, sampling.seed)
        tokens.append(token)
        if token in sampling.stop_token_ids and len(tokens) > sampling.min_tokens:
            return tokens, FinishReason.STOP
        if len(tokens) >= min(sampling.max_tokens, limit - len(request.prompt)):
            return tokens, FinishReason.LENGTH
        prefix = extend(prefix, token)


@dataclass
class Mirror:
    """What the stages know of one request."""

    tokens: list[int]
    blocks: list[int]
    num_prompt: int
    seed: int
    pooling: str | None
    computed: int
    corrupt: bool = False


@dataclass
class FakeStages:
    """Applies plans exactly in the order of fields that StepPlan documents."""

    config: SchedulerConfig
    slots: dict[tuple[int, int], int] = field(default_factory=dict)  # (block, offset) -> hash
    # host block -> offset -> hash; None: a copy that failed
    host: dict[int, dict[int, int] | None] = field(default_factory=dict)
    known: dict[int, Mirror] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> StepResult:
        self._prepare(plan)
        tokens: list[tuple[int, int]] = []
        pooled: list[tuple[int, tuple[float, ...]]] = []
        prompt_logprobs: list[tuple[int, int, tuple[TokenLogprobs, ...]]] = []
        for part in plan.slices:
            mirror = self.known[part.request_id]
            token = GARBAGE if mirror.corrupt else self._compute(part, mirror)
            end = part.start + part.num_tokens
            if part.samples:
                tokens.append((part.request_id, token))
                if self.config.num_stages == 1:
                    mirror.tokens.append(token)
            if mirror.pooling and end == mirror.num_prompt:
                pooled.append((part.request_id, (float(token),)))
            last = min(end + 1, mirror.num_prompt)
            if part.start + 1 < last:
                entries = tuple(
                    TokenLogprobs(mirror.tokens[p], -float(p), 1, ())
                    for p in range(part.start + 1, last)
                )
                prompt_logprobs.append((part.request_id, part.start + 1, entries))
        return StepResult(
            plan.step_id,
            tuple(tokens),
            pooled=tuple(pooled),
            prompt_logprobs=tuple(prompt_logprobs),
        )

    def fail(self, plan: StepPlan, applied: bool) -> None:
        """The step raises: not applied at all, or applied with garbage in the KV it writes."""
        touched = {part.request_id for part in plan.slices}
        if applied:
            self._prepare(plan)
            for part in plan.slices:
                mirror = self.known[part.request_id]
                for position in range(part.start, part.start + part.num_tokens):
                    if mirror.corrupt:
                        break
                    self.slots[self._slot(mirror, position)] = GARBAGE
        else:
            # later plans mention requests and blocks that the stages never heard of
            for start in plan.started:
                self.known[start.request_id] = Mirror([], [], 0, 0, None, 0, corrupt=True)
            for _, host in plan.swap_out:
                self.host[host] = None
        for request_id in touched | set(plan.released):
            if request_id in self.known:
                self.known[request_id].corrupt = True

    def lose(self) -> None:
        self.slots.clear()
        self.host.clear()
        self.known.clear()

    def _prepare(self, plan: StepPlan) -> None:
        size = self.config.block_size
        for request_id in plan.released:
            self.known.pop(request_id, None)
        for device, host in plan.swap_out:
            assert 0 <= host < self.config.num_host_blocks
            self.host[host] = {
                o: self.slots[device, o] for o in range(size) if (device, o) in self.slots
            }
        failed_copies: set[int] = set()
        for host, device in plan.swap_in:
            copy = self.host[host]
            if copy is None:
                failed_copies.add(device)
            for offset in range(size):
                self.slots[device, offset] = (copy or {}).get(offset, GARBAGE)
        for source, destination in plan.copies:
            assert source != destination
            for offset in range(size):
                self.slots[destination, offset] = self.slots.get((source, offset), GARBAGE)
        for start in plan.started:
            assert start.request_id not in self.known or self.known[start.request_id].corrupt
            begin = next(s.start for s in plan.slices if s.request_id == start.request_id)
            self.known[start.request_id] = Mirror(
                list(start.tokens),
                list(start.block_ids),
                start.num_prompt_tokens,
                start.sampling.seed,
                start.pooling,
                begin,
                corrupt=bool(failed_copies & set(start.block_ids)),
            )
        for request_id, blocks in plan.new_blocks:
            self.known[request_id].blocks += blocks
        for request_id, position, token in plan.fed:
            mirror = self.known[request_id]
            assert self.config.num_stages > 1
            if not mirror.corrupt:
                assert position == len(mirror.tokens), "a token is fed twice or missed"
                mirror.tokens.append(token)

    def _slot(self, mirror: Mirror, position: int) -> tuple[int, int]:
        size = self.config.block_size
        return mirror.blocks[position // size], position % size

    def _compute(self, part: Slice, mirror: Mirror) -> int:
        assert part.num_tokens > 0
        assert part.start == mirror.computed, "a gap, or a token computed twice in one life"
        end = part.start + part.num_tokens
        assert end <= len(mirror.tokens), "a token that the stages do not know"
        prefix = ROOT
        for position, token in enumerate(mirror.tokens[:end]):
            prefix = extend(prefix, token)
            slot = self._slot(mirror, position)
            if position < part.start:
                assert self.slots.get(slot) == prefix, f"wrong KV at {position} of {part}"
            else:
                self.slots[slot] = prefix
        mirror.computed = end
        if part.samples:
            assert end == len(mirror.tokens), "samples before the end of what is known"
        return draw(prefix, mirror.seed)


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
        self.stages = FakeStages(config)
        self.callers: dict[int, Caller] = {}
        self.outstanding: deque[StepPlan] = deque()
        self.plans: list[StepPlan] = []
        self.log: list[tuple[float, Event, list[Instruction]]] = []
        self.now_s = 0.0
        self.poison: set[int] = set()
        self.failures = 0
        self.wake_at_s: float | None = None

    # ---- events -----------------------------------------------------------------------

    def send(self, event: Event, after_s: float = 0.01) -> list[Instruction]:
        self.now_s += after_s
        instructions = self.core.handle(event, self.now_s)
        self.log.append((self.now_s, event, instructions))
        self.core.validate()
        for instruction in instructions:
            if isinstance(instruction, Execute):
                self._check_plan(instruction.plan)
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
        self._check_no_decode_skipped()
        return instructions

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
        sick = self.poison & {part.request_id for part in plan.slices}
        if sick:
            self.fail(applied=True)
            return
        self.outstanding.popleft()
        self.send(StepDone(self.stages.run(plan)))

    def fail(self, applied: bool, culprit: int | None = None) -> None:
        plan = self.outstanding.popleft()
        self.failures += 1
        self.stages.fail(plan, applied)
        self.send(StepFailed(plan.step_id, "kernel panic", culprit))

    def lose(self) -> None:
        self.outstanding.clear()
        self.failures += 1
        self.stages.lose()
        self.send(PipelineLost())

    def drain(self, limit: int = 20_000) -> None:
        """Answer everything until nothing is left."""
        for _ in range(limit):
            if not self.outstanding:
                break
            self.answer()
        assert self.core.is_idle, f"stuck: {list(self.core.residents.states.values())[:5]}"

    # ---- checks -----------------------------------------------------------------------

    def _check_no_decode_skipped(self) -> None:
        """With room in the pipeline nobody is left who could decode in memory it holds."""
        if len(self.outstanding) < self.config.depth:
            for state in self.core.residents.decoding:
                ready = state.in_flight < self.config.steps_per_request
                holds_memory = state.planned < state.capacity
                assert not (ready and holds_memory and state.planned < state.end), state

    def _check_budget(self, plan: StepPlan) -> None:
        """Stall-free policies: chunks never exceed the budget (but see isolation, progress)."""
        core = self.core
        stall_free = ("sarathi", "fair", "deadline", "shortest_first")
        dynamic = "chunks" in core.config.policy_options
        by_time = core.config.budget in ("profiled", "adaptive")
        excused = dynamic or by_time or self.failures or core.num_forced_steps
        if core.config.policy in stall_free and not excused:
            decodes = sum(
                part.num_tokens == 1 and part.samples and part.start > 0 for part in plan.slices
            )
            assert plan.num_tokens <= max(core.config.token_budget, decodes)

    def _check_plan(self, plan: StepPlan) -> None:
        core, size = self.core, self.config.block_size
        assert plan.slices, "an empty step"
        ids = [part.request_id for part in plan.slices]
        assert len(ids) == len(set(ids)), "two slices of one request in one step"
        assert plan.num_tokens <= self.config.max_step_tokens
        if self.config.steps_per_request == 1:
            # the next slice of whoever samples depends on the token that must come back first
            overlap = self.config.overlap_chunks
            awaited = {
                part.request_id
                for other in self.outstanding
                for part in other.slices
                if part.samples or not overlap
            }
            assert not awaited & set(ids), "a request in two steps at once"
        pinned = {block for step in core.in_flight for block in step.pinned}
        for part in plan.slices:
            state = core.residents.states[part.request_id]
            first, last = part.start // size, (part.start + part.num_tokens - 1) // size
            for block in state.blocks[first : last + 1]:
                # (a block pinned for a copy at the start of a step may be written behind it)
                shared = core.residents.blocks.is_shared(block)
                assert not shared or block in pinned, "a write to a shared block"
                for other in core.residents.states.values():
                    if other is not state:
                        assert block not in other.blocks, "two owners of a block being written"
            assert last < len(state.blocks), "no block for a token"

    def _deliver(self, output: Output) -> None:
        caller = self.callers[output.request_id]
        assert caller.finish is None, "news after the end"
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
        residents = self.core.residents
        assert residents.blocks.num_free == self.config.num_blocks
        assert residents.swap.host.num_free == self.config.num_host_blocks
        assert len(residents.groups) == 0
        assert not residents.parked
        assert residents.order.peek(self.now_s) is None
