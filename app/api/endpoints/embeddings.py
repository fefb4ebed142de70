"""`POST /v1/embeddings`: a hidden state of the model as a vector."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from array import array
from collections.abc import Sequence
from contextlib import aclosing
from typing import Final

from actors.scheduling.request import FinishReason, SamplingParams
from app.api.context import Context, as_list, new_id, objective_of, tokenized
from app.api.endpoints.large import listed, whole
from app.api.events import Deliveries, RequestOutcome
from app.api.generation import request_info
from app.api.http.call import Call
from app.api.http.errors import from_engine, invalid
from app.api.schema.other import EmbeddingRequest
from app.engine_client.client import EngineError, GenerationRequest, TokenChunk

# Inputs of one request that the engine has at a time: they fill its steps, and neither its queue
# nor a turn of the event loop.
_MOST_SUBMITTED: Final = 256


class Embeddings:
    """Handler of one request to `/v1/embeddings`."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def __call__(self, call: Call) -> None:
        body = await call.read_json(EmbeddingRequest)
        context = self._context.of(body.model)
        if not context.engine.card.supports_embeddings:
            raise invalid("This model gives no embeddings.", "model", "unsupported_model")
        pooling = body.pooling or context.text.pooling
        if pooling is None:
            raise invalid("This model's own pooling is not supported: ask for another.", "pooling")
        given = as_list(
            body.input, "input", context.options.max_embedding_inputs, "api.max_embedding_inputs"
        )
        prompts = await tokenized(given, context, "input")
        num_tokens = sum(map(len, prompts))
        call.admit_tokens(num_tokens)
        embedding_id = new_id("embd")
        requests = [
            GenerationRequest(
                request_id=f"{embedding_id}-{number}",
                prompt=tuple(prompt),
                sampling=SamplingParams(max_tokens=1),
                tenant=call.tenant(body.user),
                cache_salt=call.cache_salt(body.user),
                priority=call.check_priority(body.priority),
                objective=objective_of(body),
                arrived_s=call.arrived_s,
                pooling=pooling,
            )
            for number, prompt in enumerate(prompts)
        ]
        async with call.watch_client() as watch:
            vectors = await _vectors(requests, context, call)
            watch.stop()
            as_base64, normalize = body.encoding_format == "base64", body.normalize is not False

            def shown(numbered: tuple[int, Sequence[float]]) -> dict[str, object]:
                index, vector = numbered
                vector = normalized(vector) if normalize else vector
                embedding = _base64(vector) if as_base64 else list(vector)
                return {"object": "embedding", "index": index, "embedding": embedding}

            data = await listed(list(enumerate(vectors)), shown, per_slice=4)
            usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
            answer = {"object": "list", "model": context.engine.card.name, "usage": usage}
            await call.reply(200, list(whole(answer, data=data)))


async def _vectors(
    requests: Sequence[GenerationRequest], context: Context, call: Call
) -> list[array[float]]:
    """Every prompt's vector; one failure ends them all.

    Reported to ApiEvents as one request without output. The answer is of use once it has all
    vectors, so that their arrival is what its first token would be.
    """
    context.begin()
    events, deliveries = context.events, Deliveries()
    info = request_info(call, requests, stream=False)
    clock = asyncio.get_running_loop().time
    events.on_request_start(info, call.arrived_s, deliveries)
    status, reason = 200, "disconnect"  # if it is cancelled
    num_cached_tokens, queued_s = 0, 0.0
    vectors = [array("d") for _ in requests]  # a quarter of the memory of tuples
    numbered = enumerate(requests)

    async def submit_in_turn() -> None:
        nonlocal num_cached_tokens, queued_s
        for number, request in numbered:
            chunk = await _pooled(request, context)
            vectors[number] = array("d", chunk.pooled)
            num_cached_tokens += chunk.num_cached_tokens
            queued_s = max(queued_s, chunk.queued_s)

    num_tasks = min(len(requests), _MOST_SUBMITTED)
    tasks = [asyncio.create_task(submit_in_turn()) for _ in range(num_tasks)]
    try:
        await asyncio.gather(*tasks)
        deliveries.tokens.append((clock(), 0, 0, 1))
        reason = FinishReason.STOP.value
        return vectors
    except Exception as error:  # of any type: what is counted must say that it failed
        failure = from_engine(error)
        status, reason = failure.status, failure.code or failure.kind
        raise
    finally:
        for task in tasks:
            task.cancel()
        outcome = RequestOutcome(status, reason, 0, num_cached_tokens, queued_s)
        events.on_finish(info, outcome, clock())
        await asyncio.gather(*tasks, return_exceptions=True)
        context.end()


async def _pooled(request: GenerationRequest, context: Context) -> TokenChunk:
    """The chunk with the vector."""
    found: TokenChunk | None = None
    async with aclosing(context.engine.generate(request)) as chunks:
        async for chunk in chunks:
            if chunk.pooled:
                found = chunk
    if found is None:
        raise EngineError("The engine gave no embedding.")
    return found


def normalized(vector: Sequence[float]) -> tuple[float, ...]:
    """The vector scaled to length 1."""
    length = math.sqrt(math.fsum(value * value for value in vector))
    return tuple(value / length for value in vector) if length else tuple(vector)


def _base64(vector: Sequence[float]) -> str:
    """Little-endian float32, as OpenAI's clients ask for by default."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
