"""What a policy is, and the steps from which most of them are composed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from actors.scheduling.state import RequestState
from actors.scheduling.step import StepBuilder


class Policy(Protocol):
    """Adds slices to the step; must be deterministic and keep no request it did not get again."""

    order: str
    reserve: bool

    def plan(self, step: StepBuilder) -> None: ...


ChunkLimit = Callable[[RequestState, int], int]  # (request, budget left) -> its most tokens


def whatever_is_left(state: RequestState, left: int) -> int:
    return left


def fill_with_chunks(
    step: StepBuilder, left: int, chunk_limit: ChunkLimit = whatever_is_left
) -> None:
    """Spend `left` tokens on chunks: admitted prompts first, then new requests in order.

    With `max_chunk` set, no prompt gets more until every other has had its share.
    """
    if not step.residents.prefilling and not step.residents.num_waiting:
        return
    cap = step.config.max_chunk
    most = left if cap is None else cap
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


def fill_with_whole_prompts(step: StepBuilder, left: int, max_residents: int | None = None) -> None:
    """Spend `left` tokens on unchunked prompts, in order; the first may overrun `left`.

    Only a prompt that the stages' buffers cannot hold is cut. Nobody new starts beside
    `max_residents` requests.
    """
    residents = step.residents
    for state in step.runnable_prefills():
        left -= step.chunk(state, _whole(step, left), whole=True)
    while max_residents is None or residents.num_residents < max_residents:
        head = step.head()
        if head is None:
            return
        granted = step.start(head, _whole(step, left), whole=True)
        if granted == 0:
            return
        left -= granted


def _whole(step: StepBuilder, left: int) -> int:
    """The limit for the next whole prompt: a step without a prompt takes any."""
    return left if step.num_tokens > step.num_decodes else max(left, step.room)
