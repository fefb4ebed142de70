"""Running an HTTP request's prompts on the engine, from submission to the last piece of text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final, Protocol

from actors.scheduling.plan import TokenLogprobs
from app.api.context import Context
from app.api.continuation import Continuation, Piece, TextRules
from app.api.events import RequestInfo, RequestOutcome
from app.api.http.call import Call, ClientGone
from app.api.http.errors import from_engine
from app.engine.client import EngineError, Express, GenerationRequest, TokenChunk

_MERGE_QUEUE: Final = 64  # chunks waiting between the prompts of a batch and their one reader


class Outlet(Protocol):
    """Where mere text can go without waiting."""

    def is_open(self) -> bool:
        """False while it would have to wait."""
        ...

    def put(self, index: int, text: str) -> None:
        """More text of continuation `index`."""
        ...


class Generation:
    """The continuations of every prompt of one HTTP request.

    Continuation i of prompt p has index p * n + i. Totals are exact once `pieces` is exhausted.
    """

    def __init__(
        self,
        context: Context,
        call: Call,
        requests: Sequence[GenerationRequest],
        rules: TextRules,
        *,
        stream: bool,
    ) -> None:
        self._context = context
        self._requests = requests
        self._n = requests[0].n
        self.num_prompt_tokens = sum(len(request.prompt) for request in requests)
        self.prompt_logprobs: list[list[TokenLogprobs | None]] = [[] for _ in requests]
        self._num_cached_tokens = [0] * len(requests)
        self._queued_s = 0.0
        self.continuations = [
            Continuation(p * self._n + i, request.prompt, rules, context.text)
            for p, request in enumerate(requests)
            for i in range(request.n)
        ]
        self.info = RequestInfo(
            request_id=call.request_id,
            endpoint=str(call.scope["path"]),
            tenant=requests[0].tenant,
            stream=stream,
            num_prompt_tokens=self.num_prompt_tokens,
            num_continuations=len(self.continuations),
            traceparent=(call.header(b"traceparent") or b"").decode("latin-1"),
        )
        self._call = call

    @property
    def num_completion_tokens(self) -> int:
        return sum(continuation.num_tokens for continuation in self.continuations)

    @property
    def num_cached_tokens(self) -> int:
        return sum(self._num_cached_tokens)

    async def pieces(self, outlet: Outlet | None = None) -> AsyncGenerator[Piece, None]:
        """Every continuation's news until all are finished; close it to abort.

        Mere text that comes while the caller waits may go to `outlet` instead.
        Raises EngineError. Reports to ApiEvents, whichever way it ends.
        """
        context = self._context
        context.begin()
        events, info = context.events, self.info
        clock = asyncio.get_running_loop().time
        events.on_request_start(info, clock())
        started = False
        status, reason = 200, "disconnect"
        try:
            if len(self._requests) == 1:
                source = self._one(0, None if outlet is None else self._express(outlet))
            else:
                source = self._all()
            async with aclosing(source) as pieces:
                async for piece in pieces:
                    if piece.num_tokens:
                        now_s = clock()
                        if not started:
                            started = True
                            events.on_first_token(info, now_s)
                        events.on_tokens(info, piece.num_tokens, now_s)
                    if piece.finish_reason is not None:
                        reason = piece.finish_reason
                    yield piece
        except EngineError as error:
            failure = from_engine(error)
            status, reason = failure.status, failure.code or failure.kind
            raise
        except ClientGone:
            reason = "disconnect"
            raise
        except GeneratorExit:
            if not all(continuation.finished for continuation in self.continuations):
                reason = "disconnect"
            raise
        finally:
            context.end()
            self._call.charge(self.num_completion_tokens)
            events.on_finish(
                info,
                RequestOutcome(
                    status,
                    reason,
                    self.num_completion_tokens,
                    self.num_cached_tokens,
                    self._queued_s,
                ),
                clock(),
            )

    def _express(self, outlet: Outlet) -> Express:
        """A token's short way to the client: no task wakes for it."""
        continuations, info = self.continuations, self.info
        is_open, put = outlet.is_open, outlet.put
        on_tokens = self._context.events.on_tokens
        clock = asyncio.get_running_loop().time

        def take(index: int, tokens: list[int]) -> bool:
            continuation = continuations[index]
            if not (continuation.is_plain and is_open()):
                return False
            on_tokens(info, len(tokens), clock())
            put(index, continuation.take_plain(tokens))
            return True

        return take

    async def _one(
        self, number: int, express: Express | None = None
    ) -> AsyncGenerator[Piece, None]:
        """The continuations of one prompt."""
        engine = self._context.engine
        request = self._requests[number]
        first = number * self._n
        mine = self.continuations[first : first + self._n]
        num_open = len(mine)
        async with aclosing(engine.generate(request, express)) as chunks:
            async for chunk in chunks:
                continuation = mine[chunk.index]
                self._note_prompt(number, chunk)
                if continuation.finished:
                    continue  # tokens that were under way when its stop string was found
                piece = continuation.take(chunk)
                if piece.finish_reason is not None:
                    num_open -= 1
                    if chunk.finish_reason is None and num_open:
                        engine.finish_early(request.request_id, chunk.index)
                yield piece
                if not num_open:
                    return
        if num_open:
            raise EngineError("The engine ended the stream before every continuation finished.")

    def _note_prompt(self, number: int, chunk: TokenChunk) -> None:
        if chunk.num_cached_tokens > self._num_cached_tokens[number]:
            self._num_cached_tokens[number] = chunk.num_cached_tokens
        self._queued_s = max(self._queued_s, chunk.queued_s)
        if chunk.prompt_logprobs and chunk.index == 0:
            self.prompt_logprobs[number].extend(chunk.prompt_logprobs)

    async def _all(self) -> AsyncGenerator[Piece, None]:
        """The continuations of all prompts as they come, through one bounded queue."""
        queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(_MERGE_QUEUE)

        async def pump(number: int) -> None:
            try:
                async with aclosing(self._one(number)) as pieces:
                    async for piece in pieces:
                        await queue.put(piece)
                await queue.put(None)
            except EngineError as error:
                await queue.put(error)
            except Exception as error:  # handed to the reader below, who raises it
                await queue.put(error)

        tasks = [asyncio.create_task(pump(number)) for number in range(len(self._requests))]
        try:
            num_open = len(tasks)
            while num_open:
                item = await queue.get()
                if item is None:
                    num_open -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def usage_of(generation: Generation) -> dict[str, object]:
    """The usage object: what was computed and what of it came from the prefix cache."""
    prompt, completion = generation.num_prompt_tokens, generation.num_completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
    }
