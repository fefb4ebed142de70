"""Delivers the scheduler's outputs to readers: numbered tokens, each exactly once."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from actors.scheduling.events import PLAIN_FIELDS, Output
from actors.scheduling.request import FAILS_ALWAYS, MAX_LOSSES, OWN_FAULTS, Request
from actors.transport.messages import output_of
from app.engine_client.client import (
    EngineUnavailable,
    GenerationFailed,
    GenerationRequest,
    RequestRefused,
    TokenChunk,
    TokenSink,
)

logger = logging.getLogger("legato.engine")


class Stream:
    """The chunks that one caller reads, of one or more continuations.

    Queued chunks of the same continuation are merged, so a slow reader costs only the memory of
    its token ids.

    Waking a reader for every token costs more CPU than the token itself, because caches are cold
    by then. A given `sink` therefore gets plain tokens directly, but only while the reader waits,
    which keeps the order.
    """

    __slots__ = ("_error", "_pending", "num_open", "sink", "waiter")

    def __init__(self, sink: TokenSink | None = None) -> None:
        self._pending: dict[int, TokenChunk] = {}
        self._error: Exception | None = None
        self.waiter: asyncio.Future[None] | None = None  # set while the reader waits
        self.sink = sink
        self.num_open = 0  # continuations without a finish reason taken by the reader

    def put(self, chunk: TokenChunk) -> None:
        queued = self._pending.get(chunk.index)
        if queued is None:
            self._pending[chunk.index] = chunk
        else:
            queued.tokens += chunk.tokens
            queued.num_steps += chunk.num_steps
            queued.logprobs += chunk.logprobs
            queued.prompt_logprobs += chunk.prompt_logprobs
            queued.finish_reason = chunk.finish_reason
            queued.num_cached_tokens = queued.num_cached_tokens or chunk.num_cached_tokens
            queued.pooled = queued.pooled or chunk.pooled
            queued.queued_s = queued.queued_s or chunk.queued_s
        self._wake()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    def fail_late(self, limit_s: float) -> None:
        """Fail because the deadline has passed."""
        self.fail(
            EngineUnavailable(f"not done within {limit_s:g} s (setting engine.request_deadline_s)")
        )

    def leave(self) -> None:
        """Stop waiting for one continuation."""
        self.num_open -= 1
        self._wake()

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def get(self) -> list[TokenChunk]:
        """All new chunks; empty once no continuation is open.

        Raises the error given to `fail`, after the chunks.
        """
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self.num_open <= 0:
                return []
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        chunks = list(self._pending.values())
        self._pending = {}
        self.num_open -= sum(1 for c in chunks if c.finish_reason is not None)
        return chunks


@dataclass(slots=True)
class OpenRequest:
    """One open sequence: its request, and every token delivered so far (for a replay)."""

    request: Request
    index: int  # among the continuations of its stream
    stream: Stream
    delivered: list[int] = field(default_factory=list)
    base: int = 0  # tokens delivered before this stream, by an earlier one
    has_started: bool = False  # it has been sent to the stages
    num_losses: int = 0  # lost engines that it may have caused

    def __post_init__(self) -> None:
        self.base = len(self.request.output)

    def deliver(self, output: Output) -> None:
        """Push new tokens; replayed tokens that were delivered before are dropped."""
        known = self.base + len(self.delivered)
        skip = max(0, known - output.index)
        tokens = list(output.tokens[skip:])
        if not (tokens or output.finish_reason or output.prompt_logprobs or output.pooled):
            return
        self.delivered += tokens
        self.stream.put(
            TokenChunk(
                index=self.index,
                first=known,
                tokens=tokens,
                finish_reason=output.finish_reason,
                # Replayed tokens that were delivered before.
                num_cached_tokens=0 if known > self.base else output.num_cached_tokens,
                logprobs=list(output.logprobs[skip:]),
                prompt_logprobs=[] if known > self.base else list(output.prompt_logprobs),
                pooled=output.pooled,
                queued_s=0.0 if known > self.base else output.queued_s,
            )
        )

    def rename(self, request_id: int) -> None:
        """Set its id at the scheduler that it is sent to."""
        self.request = replace(self.request, request_id=request_id)

    def resumed(self) -> Request:
        """The request for a new scheduler: delivered tokens are known, not drawn again."""
        output = (*self.request.output, *self.delivered)
        return replace(self.request, output=output, num_losses=self.num_losses)

    def replayed(self) -> Request:
        """The same for one that takes the place of a scheduler that had accepted it."""
        return replace(self.resumed(), is_replayed=True, has_started=self.has_started)


class OpenRequests(dict[int, OpenRequest]):
    """Every open request of a replica, by its id at the scheduler."""

    def __init__(self, *entries: Any) -> None:
        super().__init__(*entries)
        self._on_trial: tuple[int, ...] = ()
        self._stages_are_lost = False

    def add(self, requests: Sequence[Request], stream: Stream) -> None:
        """Add the continuations of one request, all read from this stream."""
        for index, request in enumerate(requests):
            self[request.request_id] = OpenRequest(request, index, stream)
        stream.num_open = len(requests)

    def deliver(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """Deliver rows of `IterationOutputs`. This loop runs once per streamed token."""
        for row in rows:
            entry = self.get(row[0])
            if entry is None:
                continue  # it has ended meanwhile
            if len(row) != PLAIN_FIELDS:
                self._deliver_output(entry, output_of(row))
                continue
            _, index, token = row
            stream, delivered = entry.stream, entry.delivered
            sink, waiter = stream.sink, stream.waiter
            if (
                sink is not None
                and waiter is not None
                and not waiter.done()
                and index == entry.base + len(delivered)
            ):
                try:
                    if sink.write(entry.index, (token,)):
                        delivered.append(token)
                        continue
                except Exception as error:  # raised by the reader's sink: the reader gets it
                    stream.fail(error)
                    continue
            entry.deliver(output_of(row))

    def _deliver_output(self, entry: OpenRequest, output: Output) -> None:
        if output.error is not None:
            del self[output.request_id]
            entry.deliver(output._replace(finish_reason=None))
            if output.error in OWN_FAULTS:
                entry.stream.fail(RequestRefused(output.error))
                return
            logger.error("a request ended: %s", output.error)
            entry.stream.fail(GenerationFailed(output.error))
            return
        entry.deliver(output)
        if output.finish_reason is not None:
            del self[output.request_id]

    # ---- requests that may have killed an engine ------------------------------------------

    def started(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            if request_id in self:
                self[request_id].has_started = True

    def suspected(
        self,
        losses: Iterable[tuple[int, int]],
        on_trial: tuple[int, ...],
        stages_are_lost: bool = False,
    ) -> None:
        """Record the scheduler's suspects, and those of them in flight; see `Suspects`."""
        num_losses = dict(losses)
        for request_id, entry in self.items():
            entry.num_losses = num_losses.get(request_id, 0)
        self._on_trial, self._stages_are_lost = on_trial, stages_are_lost

    def engine_lost(self) -> None:
        """The scheduler has died: its requests are suspects; one that ran alone may be failed. As
        it rebuilds its stages nothing runs, and their loss is counted already."""
        if self._stages_are_lost:
            self._stages_are_lost = False
            return
        tried = [i for i in self._on_trial if i in self]
        is_alone = len(self._on_trial) == 1  # includes requests of other fronts
        self._on_trial = ()
        for request_id in tried or [i for i, entry in self.items() if entry.has_started]:
            entry = self[request_id]
            entry.num_losses += 1
            if is_alone and entry.num_losses >= MAX_LOSSES:
                self.fail(request_id, GenerationFailed(FAILS_ALWAYS))

    def fail(self, request_id: int, error: Exception) -> None:
        entry = self.pop(request_id, None)
        if entry is not None:
            entry.stream.fail(error)

    def fail_all(self, error: Exception) -> None:
        for request_id in list(self):
            self.fail(request_id, error)


def core_requests(request: GenerationRequest, ids: Iterator[int], now_s: float) -> list[Request]:
    """The core's requests: one per continuation, each with its own seed."""
    sampling = request.sampling
    arrived_s = now_s if request.arrived_s is None else request.arrived_s
    # Not by the request's id, which its client may have chosen, as another's client.
    group = uuid.uuid4().hex if request.n > 1 else None
    return [
        Request(
            request_id=next(ids),
            prompt=request.prompt,
            sampling=replace(sampling, seed=(sampling.seed + index) % (1 << 63))
            if index
            else sampling,
            arrival_s=arrived_s,
            output=request.output,
            tenant=request.tenant,
            priority=request.priority,
            objective=request.objective,
            group=group,
            pooling=request.pooling,
            cache_salt=request.tenant if request.cache_salt is None else request.cache_salt,
            adapter=request.adapter,
        )
        for index in range(request.n)
    ]
