"""An engine whose answers can be computed by hand.

Unless a script is given, token i of continuation c is a sum of prompt, c, seed and 7 i, modulo a
constant; log-probabilities are simple functions of the token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from actors.scheduling.interfaces import Quote, QuoteRequest
from actors.scheduling.plan import TokenLogprobs
from actors.scheduling.request import FinishReason
from app.engine_client.client import (
    EngineClient,
    GenerationRequest,
    ModelCard,
    TokenChunk,
    TokenSink,
)


def logprobs_of(token: int, num_top: int) -> TokenLogprobs:
    """-(token % 8) / 4 - 0.25 for the token, and the ids below it as alternatives."""
    top = tuple((max(token - k, 0), -0.25 * (k + 1)) for k in range(num_top))
    return TokenLogprobs(token, -(token % 8) / 4 - 0.25, 1 + token % 8, top)


class HandEngine(EngineClient):
    """Implements EngineClient. Everything a test may want to steer is a plain attribute."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card
        self.ready = True
        self.script: Callable[[GenerationRequest, int], Sequence[int]] | None = None
        self.chunk_size = 1  # tokens per chunk
        self.chunk_steps = 1  # that a chunk says its tokens are of
        # Every chunk after the first waits for it, and every vector.
        self.gate: asyncio.Event | None = None
        self.gates_first = False  # the first chunk waits as well
        self.at_gate = asyncio.Event()  # the reader has taken all chunks before the gate
        self.fail_at: int | None = None  # raise `failure` before this token
        self.failure: Exception = RuntimeError("boom")
        self.refusal: Exception | None = None
        self.quoted = Quote(True)
        self.asked: list[QuoteRequest] = []
        self.num_cached_tokens = 0
        self.num_resets = 0  # of the prefix cache
        self.reset_failure: Exception | None = None
        self.seen: list[GenerationRequest] = []
        self.num_running = 0
        self.num_sunk = 0  # chunks that no reader was woken for
        self.closed: list[str] = []  # request ids whose stream was closed before its end
        self.ended_early: list[tuple[str, int]] = []
        self.all_idle = asyncio.Event()

    @property
    def card(self) -> ModelCard:
        return self._card

    def tokens(self, request: GenerationRequest, index: int) -> list[int]:
        """All tokens of one continuation, the end-of-sequence token included."""
        sampling = request.sampling
        if self.script is not None:
            tokens = list(self.script(request, index))
        else:
            base = sum(request.prompt) + index
            tokens = [97 + (base + i * 7) % 26 for i in range(sampling.max_tokens)]
        for position, token in enumerate(tokens[: sampling.max_tokens]):
            if token in sampling.stop_token_ids and position >= sampling.min_tokens:
                return tokens[: position + 1]
        return tokens[: sampling.max_tokens]

    async def generate(
        self, request: GenerationRequest, sink: TokenSink | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        self.seen.append(request)
        if self.refusal is not None:
            raise self.refusal
        self.num_running += 1
        self.all_idle.clear()
        done = False
        try:
            async for chunk in self._chunks(request):
                plain = chunk.first and chunk.finish_reason is None and not chunk.logprobs
                if plain and sink is not None and sink.write(chunk.index, chunk.tokens):
                    self.num_sunk += 1
                else:
                    yield chunk
            done = True
        finally:
            self.num_running -= 1
            if not done:
                self.closed.append(request.request_id)
            if not self.num_running:
                self.all_idle.set()

    async def _chunks(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        if request.pooling is not None:
            if self.gate is not None:
                self.at_gate.set()
                await self.gate.wait()
            vector = (float(sum(request.prompt)), 1.0, 2.0, 4.0)
            num_cached = self.num_cached_tokens
            yield TokenChunk(0, 0, [], FinishReason.STOP, num_cached, pooled=vector)
            return
        plans = [self.tokens(request, index) for index in range(request.n)]
        position = 0
        while any(position < len(plan) for plan in plans):
            if self.gate is not None and (position or self.gates_first):
                self.at_gate.set()
                await self.gate.wait()
            else:
                await asyncio.sleep(0)
            for index, plan in enumerate(plans):
                part = plan[position : position + self.chunk_size]
                if not part:
                    continue
                if self.fail_at is not None and position >= self.fail_at:
                    raise self.failure
                last = position + len(part) == len(plan)
                yield self._chunk(request, index, position, part, last)
            position += self.chunk_size

    def _chunk(
        self, request: GenerationRequest, index: int, first: int, part: list[int], last: bool
    ) -> TokenChunk:
        sampling = request.sampling
        reason = None
        if last:
            by_token = part[-1] in sampling.stop_token_ids
            reason = FinishReason.STOP if by_token else FinishReason.LENGTH
        chunk = TokenChunk(index, first, part, reason, num_steps=self.chunk_steps)
        if sampling.logprobs is not None:
            chunk.logprobs = [logprobs_of(token, sampling.logprobs) for token in part]
        if first == 0:
            # As in the core: the other continuations share what the first one has computed.
            chunk.num_cached_tokens = len(request.prompt) - 1 if index else self.num_cached_tokens
            if sampling.prompt_logprobs is not None and index == 0:
                chunk.prompt_logprobs = [
                    None,
                    *(logprobs_of(t, sampling.prompt_logprobs) for t in request.prompt[1:]),
                ]
        return chunk

    def finish_early(self, request_id: str, index: int) -> None:
        self.ended_early.append((request_id, index))

    def is_ready(self) -> bool:
        return self.ready

    async def status(self) -> Mapping[str, Any]:
        return {"num_requests_running": self.num_running}

    async def subscribe_iterations(self) -> AsyncGenerator[list[Mapping[str, Any]], None]:
        yield []

    async def quote(self, asked: QuoteRequest) -> Quote:
        self.asked.append(asked)
        return self.quoted

    async def reconfigure(self, changes: Mapping[str, Any]) -> None:
        return None

    async def reset_prefix_cache(self) -> None:
        if self.reset_failure is not None:
            raise self.reset_failure
        self.num_resets += 1
