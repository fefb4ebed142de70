"""Stall-free batching (Sarathi-Serve, OSDI '24, algorithm 3).

Every running decode gets its token; the rest of the budget goes to chunks of unfinished prompts,
then to first chunks of new ones. No decode waits for a prompt.
"""

from __future__ import annotations

from collections.abc import Callable

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.state import RequestState
from actors.scheduling.step import StepBuilder

_ROUNDING = 32

ChunkLimit = Callable[[RequestState, int], int]  # (request, budget left) -> its most tokens


def whatever_is_left(state: RequestState, left: int) -> int:
    return left


def fill_with_chunks(
    step: StepBuilder, left: int, chunk_limit: ChunkLimit = whatever_is_left
) -> None:
    """Spend `left` tokens on chunks: admitted prompts first, then new requests in order.

    A stream that another engine has begun goes first, since each step for which it waits is a gap;
    what it lacks is a few tokens, where its KV has moved. With `max_chunk` set, no prompt gets more
    until every other has had its share.
    """
    if not step.wants_prefill:
        return
    cap = step.config.max_chunk
    most = left if cap is None else cap
    while left > 0 and (head := step.head()) is not None and head.request.output:
        granted = step.start(head, min(left, chunk_limit(head, left)))
        if granted == 0:
            break
        left -= granted
    for state in step.runnable_prefills():
        if left <= 0:
            return
        left -= step.chunk(state, min(most, left, chunk_limit(state, left)))
    while left > 0 and (head := step.head()) is not None:
        granted = step.start(head, min(most, left, chunk_limit(head, left)))
        if granted == 0:
            break
        left -= granted
    if cap is not None:
        for state in step.runnable_prefills():
            if left <= 0:
                return
            left -= step.chunk(state, min(left, chunk_limit(state, left)))


def give_way(step: StepBuilder) -> bool:
    """Preempt a background request whose place a live one needs: the head of the queue, or one set
    aside by its tenant's cap. Returns whether the live one can then start soon."""
    head = step.head()
    if head is not None and step.is_place_coming:
        return True
    for waits in (head, *step.capped()):
        if waits is None or (waits is head and not step.lacks_place(head)):
            continue
        later = [
            state
            for state in (*step.decoding, *step.prefilling)
            if state.is_background and state.suspicion is None and step.goes_before(waits, state)
        ]
        if not later or step.lacks_place(waits, without=later):
            continue  # they would be preempted in vain
        if waits is not head:  # its tenant's come first; as the head it takes of the others, too
            later = [state for state in later if state.request.tenant == waits.request.tenant]
        if later:
            step.preempt(max(later, key=lambda state: state.order_key))
            return True
    return False


def fill_with_background(step: StepBuilder) -> None:
    """Add the decodes that have waited longest for a token, and chunks, as the budget allows."""
    ready = step.runnable_decodes()
    context = sum([s.num_computed_tokens for s in ready]) // max(1, len(ready))
    most = step.budget.num_background_decodes(step.shape, len(ready), context)
    step.decode_all(min(most, step.room))
    fill_with_chunks(step, min(step.room, step.budget.room_for_background(step.shape)))


class Sarathi:
    """chunks "fixed": up to the budget. "dynamic": a prompt's chunks shrink as it progresses,
    from `high` to `low` tokens in `num_sizes` equal steps over `span` tokens, so that a long prompt
    yields to others; past the schedule they stay at `low`.
    """

    order = "fcfs"
    reserve = False

    def __init__(
        self,
        config: SchedulerConfig,
        chunks: str = "fixed",
        high: int = 2048,
        low: int = 128,
        num_sizes: int = 16,
        span: int = 131072,
    ) -> None:
        if chunks not in ("fixed", "dynamic"):
            raise TypeError("chunks is 'fixed' or 'dynamic'")
        if not 0 < low <= high or num_sizes < 1 or span < 1:
            raise TypeError("0 < low <= high, and num_sizes and span are at least 1")
        self.dynamic = chunks == "dynamic"
        self.schedule = chunk_schedule(high, low, num_sizes)
        self.tokens_per_size = max(1, span // num_sizes)

    def plan(self, step: StepBuilder) -> None:
        if not step.are_mixed:
            self._fill(step)
            return
        step.narrow(is_background=False)
        # Else prompts that fill every step would keep background decodes waiting without end.
        lengths = [state.decode_length for state in step.decoding if state.is_background]
        self._fill(step, kept=max(lengths, default=0))
        # Those that wait behind background requests come the sooner the faster these go on.
        has_live = give_way(step) or not step.contents.is_empty or step.is_in_flight
        step.narrow(is_background=True)
        if has_live:
            fill_with_background(step)
        else:
            self._fill(step)
        step.narrow(None)

    def _fill(self, step: StepBuilder, kept: int = 0) -> None:
        """kept: tokens of the stages' buffers that chunks leave to others."""
        step.decode_all()
        room = max(0, step.room - kept)
        if not self.dynamic:
            fill_with_chunks(step, min(step.tokens_left(), room))
            return
        # The schedule, not the budget, limits the step, for each prompt by the step's content.
        fill_with_chunks(step, room, lambda state, _: self._share(step, state))

    def _share(self, step: StepBuilder, state: RequestState) -> int:
        """The first prompt goes on beside any number of decodes."""
        contents = step.contents
        share = self.chunk_size(state) - contents.num_tokens
        return share if contents.prefills else max(share, _ROUNDING)

    def chunk_size(self, state: RequestState) -> int:
        """Tokens a step may hold for this prompt to join it."""
        return self.schedule[
            min(state.num_computed_tokens // self.tokens_per_size, len(self.schedule) - 1)
        ]


def chunk_schedule(high: int, low: int, num_sizes: int) -> list[int]:
    """Falling chunk sizes, rounded down to multiples of 32 (never below `low`).

    >>> chunk_schedule(2048, 128, 4)
    [2048, 1408, 768, 128]
    """
    if num_sizes == 1:
        return [high]
    fall = (high - low) / (num_sizes - 1)
    return [max(low, int(high - k * fall) // _ROUNDING * _ROUNDING) for k in range(num_sizes)]


class Fair(Sarathi):
    """Stall-free batches; the tenants' virtual token counters decide which request starts next."""

    order = "fair"


class Deadline(Sarathi):
    """Stall-free batches; prompts whose first token is due soonest go first (Niyama / QoServe)."""

    order = "deadline"


class ShortestFirst(Sarathi):
    """Stall-free batches; shortest expected output first, waiting time counted."""

    order = "shortest"
