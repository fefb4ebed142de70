"""Tells fronts which blocks of prompts that will be handed over are saved, as they are saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from actors.scheduling.core import Core
from actors.scheduling.state import RequestState, RequestStatus
from actors.transport.messages import KVSaved


@dataclass(slots=True)
class _Prompt:
    """num_blocks: full ones. num_told: of these, from the first. num_queued: of the save queue
    when it ended; what is not settled by then was given up."""

    state: RequestState
    num_blocks: int
    num_told: int = 0
    num_queued: int | None = None


class SavedPrompts:
    """Tells fronts which blocks of the streams that will leave this engine are saved.

    Call `started` for each plan and `tell` after each event. Each block is reported once, after
    the blocks before it."""

    def __init__(self, core: Core, send: Callable[[KVSaved], None]) -> None:
        assert core.tier is not None
        self._core = core
        self._tier = core.tier
        self._send = send
        self._open: dict[int, _Prompt] = {}
        self._num_settled = 0

    @property
    def num_open(self) -> int:
        """Prompts of which something may still be told."""
        return len(self._open)

    def started(self, request_ids: Iterable[int]) -> None:
        """These begin. What of them is saved already is told at once."""
        for request_id in request_ids:
            state = self._core.live_requests.get(request_id)
            if state is not None and request_id not in self._open:
                size = self._core.config.block_size
                self._open[request_id] = _Prompt(state, state.num_prompt_tokens // size)
                self._tell(request_id)

    def tell(self) -> None:
        """Tell what has been saved since the last call, also of prompts that have ended."""
        if not self._open:
            return
        queue = self._tier.queue
        is_new = queue.num_settled != self._num_settled
        self._num_settled = queue.num_settled
        for request_id, prompt in list(self._open.items()):
            if prompt.num_queued is None and prompt.state.status is RequestStatus.ENDED:
                prompt.num_queued = queue.num_queued
            is_over = prompt.num_queued is not None and self._num_settled >= prompt.num_queued
            if is_new or is_over:
                self._tell(request_id)
            if is_over:
                self._open.pop(request_id, None)

    def _tell(self, request_id: int) -> None:
        prompt = self._open[request_id]
        size, begin, end = self._core.config.block_size, prompt.num_told, prompt.num_told
        while end < prompt.num_blocks:
            if not self._tier.contents.holds(prompt.state.block_hash(end, size)):
                break
            end += 1
        if end > begin:
            prompt.num_told = end
            digests = prompt.state.block_hashes(end, size)[begin:]
            self._send(KVSaved(request_id, tuple(digests)))
        if end == prompt.num_blocks:
            del self._open[request_id]
