"""Between the iteration message and the reader: numbered tokens, delivered once, never lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from actors.scheduling.events import Output
from actors.scheduling.request import Request
from app.engine.client import Express, GenerationRequest, TokenChunk


class Stream:
    """What one caller reads: chunks of one or more continuations.

    A slow reader costs memory for its own token ids alone: chunks queued for the same continuation
    merge into one.

    Waking a reader for every token costs more than the token: caches are cold by the time it
    comes. `express`, where given, is called in place of that, but only while the reader waits, so
    that nothing is overtaken.
    """

    __slots__ = ("_error", "_express", "_pending", "_waiter", "num_open")

    def __init__(self, express: Express | None = None) -> None:
        self._pending: dict[int, TokenChunk] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._express = express
        self.num_open = 0  # continuations without a finish reason taken by the reader

    def pass_on(self, index: int, tokens: list[int]) -> bool:
        """Hand plain tokens to `express`; False when they must be pushed."""
        waiter = self._waiter
        if self._express is None or waiter is None or waiter.done():
            return False
        try:
            return self._express(index, tokens)
        except Exception as error:  # the reader's own, so it shall have it
            self.fail(error)
            return True

    def push(self, chunk: TokenChunk) -> None:
        queued = self._pending.get(chunk.index)
        if queued is None:
            self._pending[chunk.index] = chunk
        else:
            queued.tokens += chunk.tokens
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

    def leave(self) -> None:
        """One continuation is not wanted any more."""
        self.num_open -= 1
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[TokenChunk]:
        """Everything new: at least one chunk, or none once nothing is open any more.

        Raises what `fail` was given, after the chunks.
        """
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self.num_open <= 0:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        chunks = list(self._pending.values())
        self._pending = {}
        self.num_open -= sum(1 for c in chunks if c.finish_reason is not None)
        return chunks


def core_requests(request: GenerationRequest, ids: Iterator[int], now_s: float) -> list[Request]:
    """What the scheduler gets of a request: one per continuation, each with a seed of its own."""
    sampling = request.sampling
    return [
        Request(
            request_id=next(ids),
            prompt=request.prompt,
            sampling=replace(sampling, seed=(sampling.seed + index) % (1 << 63))
            if index
            else sampling,
            arrival_s=now_s,
            output=request.output,
            tenant=request.tenant,
            priority=request.priority,
            objective=request.objective,
            group=request.request_id if request.n > 1 else None,
            pooling=request.pooling,
            cache_salt=request.tenant,
        )
        for index in range(request.n)
    ]


@dataclass(slots=True)
class Continuation:
    """One open sequence: what was asked, and every token delivered so far (for a replay)."""

    request: Request
    index: int
    stream: Stream
    delivered: list[int] = field(default_factory=list)
    base: int = 0  # tokens that an earlier life had delivered before this stream

    def __post_init__(self) -> None:
        self.base = len(self.request.output)

    def deliver_plain(self, index: int, tokens: list[int]) -> None:
        """`deliver` for tokens that come with nothing else, as nearly all do."""
        if index == self.base + len(self.delivered) and self.stream.pass_on(self.index, tokens):
            self.delivered += tokens
        else:
            self.deliver(Output(self.request.request_id, index, tuple(tokens)))

    def deliver(self, output: Output) -> None:
        """Pass on what is new; a replayed token that was delivered before is dropped."""
        known = self.base + len(self.delivered)
        skip = max(0, known - output.index)
        tokens = list(output.tokens[skip:])
        if not (tokens or output.finish_reason or output.prompt_logprobs or output.pooled):
            return
        self.delivered += tokens
        self.stream.push(
            TokenChunk(
                index=self.index,
                first=known,
                tokens=tokens,
                finish_reason=output.finish_reason,
                num_cached_tokens=output.num_cached_tokens,
                logprobs=list(output.logprobs[skip:]),
                prompt_logprobs=list(output.prompt_logprobs),
                pooled=output.pooled,
                queued_s=output.queued_s,
            )
        )

    def resumed(self) -> Request:
        """The request as a rebuilt scheduler must see it: nothing delivered is drawn again."""
        return replace(self.request, output=(*self.request.output, *self.delivered))
