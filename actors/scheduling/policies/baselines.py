"""The policies that the paper compares with, and its two ablations, on the same engine."""

from __future__ import annotations

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.policies.sarathi import fill_with_chunks
from actors.scheduling.registry import within
from actors.scheduling.step import StepBuilder


class FasterTransformer:
    """Request-level batching (FasterTransformer; Sarathi-Serve, algorithm 1).

    A batch is filled with whole prompts, then decoded until its last request is done; only then is
    the next one admitted. Decodes never stall, the GPU empties towards the end of each batch.
    """

    order = "fcfs"
    reserve = True

    def __init__(self, config: SchedulerConfig, max_batch: int | None = None) -> None:
        within(1, 1e9, max_batch=max_batch)
        self.max_batch = max_batch or config.max_requests
        self._places = self.max_batch  # left in this batch, also where a member has ended

    def plan(self, step: StepBuilder) -> None:
        if step.num_slots_taken == 0:
            self._places = self.max_batch
        most = min(self.max_batch, step.num_running + self._places)
        fill_with_whole_prompts(step, step.room, max_running=most)
        self._places -= len(step.contents.starting)
        if step.contents.is_empty:
            step.decode_all()
            if step.contents.num_streams:
                self._places = 0


class Orca:
    """Iteration-level hybrid batching (Orca, OSDI '22; Sarathi-Serve, algorithm 2).

    All decodes run beside whole prompts. KV for a request's maximum length is reserved before it
    starts, so nothing is ever preempted and batches stay small (`max_batch`, 8 to 16 in the paper).
    """

    order = "fcfs"
    reserve = True

    def __init__(self, config: SchedulerConfig, max_batch: int | None = None) -> None:
        within(1, 1e9, max_batch=max_batch)
        self.max_batch = max_batch or config.max_requests

    def plan(self, step: StepBuilder) -> None:
        step.decode_all()
        fill_with_whole_prompts(step, step.room, max_running=self.max_batch)


class PrefillFirst:
    """Prefill-first iteration-level batching (vLLM, SOSP '23; Sarathi-Serve, algorithm 2).

    While a waiting prompt fits, a step is whole prompts only, up to `max_batched_tokens`; decodes
    stall meanwhile. Otherwise the step is all decodes. KV is paged and grows on demand.
    """

    order = "fcfs"
    reserve = False

    def __init__(self, config: SchedulerConfig, max_batched_tokens: int | None = None) -> None:
        within(1, 1e9, max_batched_tokens=max_batched_tokens)
        self.max_batched_tokens = max_batched_tokens or config.max_step_tokens

    def plan(self, step: StepBuilder) -> None:
        fill_with_whole_prompts(step, self.max_batched_tokens)
        if step.contents.is_empty:
            step.decode_all()


class ChunkedOnly:
    """Chunked prompts without hybrid batches (the Sarathi-Serve ablation, table 4).

    Chunks and decodes take turns: a step holds one kind or the other.
    """

    order = "fcfs"
    reserve = False

    def __init__(self, config: SchedulerConfig) -> None:
        self._prefill_turn = True

    def plan(self, step: StepBuilder) -> None:
        for prefill in (self._prefill_turn, not self._prefill_turn):
            if prefill:
                fill_with_chunks(step, step.tokens_left())
            else:
                step.decode_all()
            if not step.contents.is_empty:
                self._prefill_turn = not prefill
                return


class HybridOnly:
    """Hybrid batches of unchunked prompts (the Sarathi-Serve ablation, table 4).

    All decodes run beside whole prompts: Orca's batching on paged KV. A long prompt delays every
    decode of its step.
    """

    order = "fcfs"
    reserve = False

    def __init__(self, config: SchedulerConfig, max_batched_tokens: int | None = None) -> None:
        within(1, 1e9, max_batched_tokens=max_batched_tokens)
        self.max_batched_tokens = max_batched_tokens or config.max_step_tokens

    def plan(self, step: StepBuilder) -> None:
        step.decode_all()
        fill_with_whole_prompts(step, self.max_batched_tokens - step.contents.num_tokens)


def fill_with_whole_prompts(step: StepBuilder, left: int, max_running: int | None = None) -> None:
    """Spend `left` tokens on unchunked prompts, in order; the first may overrun `left`.

    A prompt is cut only if it exceeds the stages' buffers. One that was begun under another policy
    continues with what fits. No request starts beside `max_running` others.
    """
    for state in step.runnable_prefills():
        left -= step.chunk(state, _whole(step, left))
    while max_running is None or step.num_running < max_running:
        head = step.head()
        if head is None:
            return
        granted = step.start(head, _whole(step, left), whole=True)
        if granted == 0:
            return
        left -= granted


def _whole(step: StepBuilder, left: int) -> int:
    """The limit for the next whole prompt; a step without one takes a prompt of any length."""
    return left if step.contents.prefills else max(left, step.room)
