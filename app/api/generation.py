"""Runs an HTTP request's prompts on the engine, from submission to the last text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Final

from actors.scheduling.plan import TokenLogprobs
from actors.scheduling.request import FinishReason, SamplingParams
from app.api.context import Context, objective_of
from app.api.events import Deliveries, RequestInfo, RequestOutcome, RequestTiming
from app.api.http.call import Call
from app.api.http.errors import from_engine
from app.api.http.guard import path_below
from app.api.schema.common import ScheduleFields
from app.engine_client.client import EngineError, GenerationRequest, TokenChunk, TokenSink
from app.text.incremental import TextDelta, TextRules, TextStream

_PART_VALUES: Final = 1000  # log-probabilities written in one turn of the event loop
_MERGE_QUEUE: Final = 64  # chunks waiting between the prompts of a batch and their one reader


def generation_request(
    call: Call,
    body: ScheduleFields,
    request_id: str,
    prompt: Sequence[int],
    sampling: SamplingParams,
    n: int = 1,
) -> GenerationRequest:
    """One prompt of a body for the engine. Raises 403 for a priority above the key's."""
    return GenerationRequest(
        request_id=request_id,
        prompt=tuple(prompt),
        sampling=sampling,
        n=n,
        tenant=call.tenant(body.user),
        cache_salt=call.cache_salt(body.user),
        priority=call.check_priority(body.priority),
        objective=objective_of(body),
    )


def request_info(call: Call, requests: Sequence[GenerationRequest], *, stream: bool) -> RequestInfo:
    """All prompts of one HTTP request, which is reported as one."""
    return RequestInfo(
        request_id=call.request_id,
        endpoint=path_below(call.scope),
        tenant=requests[0].tenant,
        stream=stream,
        num_prompt_tokens=sum(len(request.prompt) for request in requests),
        num_continuations=sum(request.n for request in requests),
        traceparent=(call.header(b"traceparent") or b"").decode("latin-1"),
        objective=requests[0].objective,
    )


class Generation:
    """The continuations of every prompt of one HTTP request.

    Continuation i of prompt p has index p * n + i. Totals are exact, and `timing` is known, once
    `deltas` is exhausted. is_mere_echo: only the prompts are wanted; of the token that the engine
    draws even so nothing is told, counted or charged. Raises RequestRefused at once where a refusal
    is foreseen.
    """

    def __init__(
        self,
        context: Context,
        call: Call,
        requests: Sequence[GenerationRequest],
        rules: TextRules,
        *,
        stream: bool,
        is_mere_echo: bool = False,
    ) -> None:
        self._context = context
        self._call = call
        self._is_mere_echo = is_mere_echo
        self.info = request_info(call, requests, stream=stream)
        self.num_prompt_tokens = self.info.num_prompt_tokens
        self._refuse_foreseen(requests)
        self._n = n = requests[0].n
        self._requests = [
            replace(request, arrived_s=call.arrived_s, placed=partial(self._placed, p * n))
            for p, request in enumerate(requests)
        ]
        self.prompt_logprobs: list[list[TokenLogprobs | None]] = [[] for _ in requests]
        self._num_cached_tokens = [0] * len(requests)
        self._queued_s = 0.0
        self.streams = [
            TextStream(
                p * self._n + i,
                rules,
                context.text.detokenizer(
                    request.prompt,
                    skip_special_tokens=rules.skip_special_tokens,
                    shown_special=rules.shown_special,
                ),
            )
            for p, request in enumerate(requests)
            for i in range(request.n)
        ]
        self.deliveries = Deliveries()
        self.timing: RequestTiming | None = None  # set at the end

    def _refuse_foreseen(self, requests: Sequence[GenerationRequest]) -> None:
        """Raises RequestRefused, reported as every end, where the engine foresees that it will."""
        engine, events = self._context.engine, self._context.events
        for request in requests:
            error = engine.foreseen(request)
            if error is not None:
                failure = from_engine(error)
                outcome = RequestOutcome(failure.status, failure.code or failure.kind, 0, 0)
                events.on_request_start(self.info, self._call.arrived_s, Deliveries())
                events.on_finish(self.info, outcome, asyncio.get_running_loop().time())
                raise error

    @property
    def num_completion_tokens(self) -> int:
        return 0 if self._is_mere_echo else sum(stream.num_tokens for stream in self.streams)

    @property
    def num_cached_tokens(self) -> int:
        return sum(self._num_cached_tokens)

    def _placed(self, first: int, index: int, engine_id: str) -> None:
        now_s = asyncio.get_running_loop().time()
        self.deliveries.places.append((now_s, first + index, engine_id))

    async def deltas(self, sink: TokenSink | None = None) -> AsyncGenerator[TextDelta, None]:
        """The deltas of all continuations until all are finished; closing it aborts.

        Plain tokens that come while the caller waits may go to `sink` instead, which then notes
        them in `deliveries` and in their stream's `num_tokens`.
        Raises EngineError. Reports its end to ApiEvents in any case.
        """
        context = self._context
        context.begin()
        events, info = context.events, self.info
        clock = asyncio.get_running_loop().time
        events.on_request_start(info, self._call.arrived_s, self.deliveries)
        status, reason = 200, ""
        try:
            source = self._one(0, sink) if len(self._requests) == 1 else self._all()
            async with aclosing(source) as deltas:
                async for delta in deltas:
                    if delta.num_tokens or self._is_mere_echo:  # whose end counts as first token
                        told = (clock(), delta.num_tokens, delta.index, delta.num_steps)
                        self.deliveries.tokens.append(told)
                    if delta.finish_reason is not None:
                        reason = delta.finish_reason
                    yield delta
                    if delta.entries:  # slow to write: let other tasks run
                        await asyncio.sleep(0)
        except Exception as error:  # of any type: what is counted must say that it failed
            failure = from_engine(error)
            status, reason = failure.status, failure.code or failure.kind
            raise
        finally:
            if status == 200 and not all(stream.finished for stream in self.streams):
                reason = "disconnect"  # closed or cancelled
            self._requests = []  # they refer to this
            context.end()
            self._call.charge(self.num_completion_tokens)
            self.timing = events.on_finish(
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

    async def _one(
        self, number: int, sink: TokenSink | None = None
    ) -> AsyncGenerator[TextDelta, None]:
        """The continuations of one prompt."""
        engine = self._context.engine
        request = self._requests[number]
        first = number * self._n
        mine = self.streams[first : first + self._n]
        num_open = len(mine)
        async with aclosing(engine.generate(request, sink)) as chunks:
            async for chunk in chunks:
                stream = mine[chunk.index]
                self._note_prompt(number, chunk)
                for part in _parts(chunk):
                    if stream.finished:
                        break  # tokens that arrived after its stop string was found
                    delta = stream.detokenize(part)
                    delta.num_steps = part.num_steps
                    if self._is_mere_echo:
                        reason = delta.finish_reason and FinishReason.LENGTH.value
                        delta = TextDelta(delta.index, "", 0, reason)
                    if delta.finish_reason is not None:
                        num_open -= 1
                        if part.finish_reason is None and num_open:
                            engine.finish_early(request.request_id, part.index)
                    yield delta
                    if not num_open:
                        return
        if num_open:
            raise EngineError("The engine ended the stream before every continuation finished.")

    def _note_prompt(self, number: int, chunk: TokenChunk) -> None:
        self._queued_s = max(self._queued_s, chunk.queued_s)
        if chunk.index:  # it shares the prompt that the first continuation has computed
            return
        if chunk.num_cached_tokens:
            self._num_cached_tokens[number] = chunk.num_cached_tokens
        self.prompt_logprobs[number].extend(chunk.prompt_logprobs)

    async def _all(self) -> AsyncGenerator[TextDelta, None]:
        """The chunks of all prompts in order of arrival, through one bounded queue."""
        queue: asyncio.Queue[TextDelta | Exception | None] = asyncio.Queue(_MERGE_QUEUE)

        async def pump(number: int) -> None:
            try:
                async with aclosing(self._one(number)) as deltas:
                    async for delta in deltas:
                        await queue.put(delta)
                await queue.put(None)
            except Exception as error:  # raised by the reader below
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


def _parts(chunk: TokenChunk) -> Iterator[TokenChunk]:
    """The chunk, or several in its place if it has more log-probabilities than are written in a few
    milliseconds (those of many iterations, for a reader that is slower than the engine)."""
    step = len(chunk.tokens)
    if chunk.logprobs:
        step = max(1, _PART_VALUES // (1 + len(chunk.logprobs[0].top)))
    if step >= len(chunk.tokens):
        yield chunk
        return
    ends = [*range(step, len(chunk.tokens), step), len(chunk.tokens)]
    for begin, end in pairwise([0, *ends]):
        yield replace(
            chunk,
            first=chunk.first + begin,
            tokens=chunk.tokens[begin:end],
            logprobs=chunk.logprobs[begin:end],
            finish_reason=chunk.finish_reason if end == ends[-1] else None,
        )


def usage_of(generation: Generation, num_reasoning_tokens: int | None = None) -> dict[str, object]:
    """The usage object: token counts, with those from the prefix cache.

    num_reasoning_tokens: of the completion's; None where reasoning is not separated.
    """
    prompt, completion = generation.num_prompt_tokens, generation.num_completion_tokens
    usage: dict[str, object] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
    }
    if num_reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning_tokens}
    return usage


def timing_of(generation: Generation) -> dict[str, object] | None:
    """The timing object of a stream's last event, in milliseconds; None where nothing measures."""
    timing = generation.timing
    if timing is None:
        return None
    ttft_ms = None if timing.ttft_s is None else round(1e3 * timing.ttft_s, 3)
    return {
        "queue_ms": round(1e3 * timing.queued_s, 3),
        "ttft_ms": ttft_ms,
        "max_tbt_ms": round(1e3 * timing.max_tbt_s, 3),
        "objective_kept": timing.kept,
    }
