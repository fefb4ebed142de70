"""A policy that makes the calls it is told and judges each: all that it needs, or no change."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from actors.scheduling.core import Core
from actors.scheduling.policies.base import Policy
from actors.scheduling.state import RequestState, RequestStatus
from actors.scheduling.step import StepBuilder


class Call(NamedTuple):
    """which: among those it may be about. size: of a chunk or of drafts."""

    name: str
    which: int
    size: int


# Decodes come before chunks, and drafts after the decode that they extend (`StepBuilder`).
NAMES = ("preempt", "decode", "add_drafts", "chunk", "start")


class Before(NamedTuple):
    """All that a call may change of a request."""

    status: RequestStatus
    num_computed_tokens: int
    in_flight: int
    num_drafts: int
    block_table: tuple[int, ...]
    step_id: int


def _of(state: RequestState) -> Before:
    return Before(
        state.status,
        state.num_computed_tokens,
        state.in_flight,
        state.num_drafts,
        tuple(state.block_table),
        state.step_id,
    )


class Whims:
    """A policy that calls what the test says and judges every call; then it goes on as `after`."""

    order = "fcfs"

    def __init__(self, core: Core, steps: list[list[Call]], after: Policy) -> None:
        self.requests = core.requests
        self.steps = deque(steps)
        self.after = after
        self.reserve = after.reserve
        self.block_size = core.config.block_size

    def plan(self, step: StepBuilder) -> None:
        if not self.steps:
            self.after.plan(step)
            return
        for call in sorted(self.steps.popleft(), key=lambda call: NAMES.index(call.name)):
            before = step.contents.num_tokens, step.contents.num_slices
            if not getattr(self, f"_{call.name}")(step, call):
                assert (step.contents.num_tokens, step.contents.num_slices) == before, call
            assert step.contents.num_tokens <= step.config.max_step_tokens
            assert step.shape.num_tokens == step.contents.num_tokens

    # ---- one call each; returns whether it added work ----------------------------------------

    def _decode(self, step: StepBuilder, call: Call) -> bool:
        state = _pick(step.decoding, call)
        if state is None:
            return False
        before, num_tokens = _of(state), step.contents.num_tokens
        with self._others(step, state, may_preempt=True):
            step.decode((state,))
        added = step.contents.num_tokens - num_tokens
        assert added in (0, 1)
        assert state.num_computed_tokens <= state.end
        self._check_grown(state, before, added)
        assert state.in_flight == before.in_flight + added
        assert not added or state.in_flight <= step.config.steps_per_request
        return added == 1

    def _chunk(self, step: StepBuilder, call: Call) -> bool:
        state = _pick(step.prefilling, call)
        if state is None:
            return False
        before, num_tokens = _of(state), step.contents.num_tokens
        with self._others(step, state, may_preempt=True):
            added = step.chunk(state, call.size)
        assert 0 <= added <= call.size
        assert step.contents.num_tokens == num_tokens + added
        self._check_grown(state, before, added)
        is_new = added > 0 and before.step_id != step.contents.step_id
        assert state.in_flight == before.in_flight + is_new
        assert not is_new or state.in_flight <= step.config.chunks_per_request
        return added > 0

    def _start(self, step: StepBuilder, call: Call) -> bool:
        state = step.head()
        if state is None:
            return False
        is_whole = call.which % 2 == 1
        fits = state.remaining <= step.config.max_step_tokens
        before, num_waiting = self._memory(), self.requests.num_waiting
        with self._others(step, state, may_preempt=False):
            added = step.start(state, call.size, whole=is_whole)
        if not added:
            assert state.status is RequestStatus.WAITING
            assert step.head() is state
            assert (self._memory(), self.requests.num_waiting) == (before, num_waiting)
            return False
        assert state.status is RequestStatus.RUNNING
        assert added <= call.size
        assert step.contents.prefills[state] == added
        assert self.requests.num_waiting == num_waiting - 1
        assert state.num_computed_tokens <= state.capacity
        assert not (is_whole and fits) or state.remaining == 0, "a part of a prompt"
        return True

    def _preempt(self, step: StepBuilder, call: Call) -> bool:
        state = _pick([*step.decoding, *step.prefilling], call)
        if state is None:
            return False
        before, is_in_step = _of(state), state.step_id == step.contents.step_id
        with self._others(step, state, may_preempt=False):
            step.preempt(state)
        assert is_in_step == (state.status is RequestStatus.RUNNING)
        assert not is_in_step or _of(state) == before
        return False

    def _add_drafts(self, step: StepBuilder, call: Call) -> bool:
        state = _pick(step.contents.decodes_alone, call)
        if state is None:
            return False
        left = state.end - state.num_computed_tokens
        most = min(call.size, step.config.most_drafts, left, step.room_for_drafts())
        if most <= 0:
            return False
        before, num_tokens = _of(state), step.contents.num_tokens
        with self._others(step, state, may_preempt=False):
            added = step.add_drafts(state, tuple(range(most)))
        assert 0 <= added <= most
        assert step.contents.num_tokens == num_tokens + added
        assert state.num_drafts == added
        self._check_grown(state, before, added)
        return added > 0

    # ---- checks ---------------------------------------------------------------------------------

    def _check_grown(self, state: RequestState, before: Before, added: int) -> None:
        """By so many tokens, and by the blocks that these need and no others."""
        assert state.status is RequestStatus.RUNNING
        assert state.num_computed_tokens == before.num_computed_tokens + added
        num_blocks = max(len(before.block_table), -(-state.num_computed_tokens // self.block_size))
        assert tuple(state.block_table[: len(before.block_table)]) == before.block_table
        assert len(state.block_table) == num_blocks
        assert state.capacity == num_blocks * self.block_size
        assert added or _of(state) == before

    @contextmanager
    def _others(self, step: StepBuilder, state: RequestState, may_preempt: bool) -> Iterator[None]:
        """No other request changes, but that one of a worse rank outside the step may make room."""
        others = {other: _of(other) for other in self.requests.by_id.values() if other is not state}
        yield
        for other, before in others.items():
            if may_preempt and other.status is not before.status:
                assert before.status is RequestStatus.RUNNING
                assert other.status in (RequestStatus.WAITING, RequestStatus.FINISHING)
                assert other.order_key > state.order_key
                assert other.step_id != step.contents.step_id
            else:
                assert _of(other) == before, other

    def _memory(self) -> tuple[int, int]:
        running = self.requests.running
        return running.block_manager.num_free, running.swap.host.num_free


def _pick(states: Sequence[RequestState], call: Call) -> RequestState | None:
    return states[call.which % len(states)] if states else None
