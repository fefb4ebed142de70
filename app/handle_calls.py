"""The calls of a replica's Serve handle, for Python callers.

In a fleet these streams, like a front's others, survive the engine that computes them. After the
death of a front a caller can continue on another by `generate`, with the delivered tokens as
`output` and, if it samples, the same explicit `seed`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

from actors.scheduling.request import Objective, SamplingParams
from app.api.endpoints.embeddings import normalized
from app.api.events import ApiEvents, Deliveries, RequestInfo, RequestOutcome
from app.api.http.errors import from_engine
from app.engine_client.client import (
    AdapterControl,
    EngineClient,
    EngineError,
    EngineUnavailable,
    GenerationRequest,
    ModelCard,
    TokenChunk,
)
from app.engine_client.iteration_feed import IterationFeed
from app.handle_params import checked_ids, parse_params
from app.text.chat_template import (
    ConversationInvalid,
    TemplateBusy,
    TemplateError,
    TemplateMissing,
)
from app.text.incremental import is_ended_by_token
from app.text.processor import TextProcessor


class ReplicaEngine(EngineClient, Protocol):
    """`LiveEngine` or `FleetClient`."""

    objective: Objective
    iterations: IterationFeed

    @property
    def num_blocks(self) -> int: ...
    async def close(self) -> None: ...


class ServedModel(NamedTuple):
    """The parts that serve one model."""

    engine: ReplicaEngine
    text: TextProcessor
    adapters: AdapterControl | None = None  # None: it has no slots


_UNCOUNTED: Final = ApiEvents()


class _Call:
    """A call as telemetry sees it."""

    def __init__(self) -> None:
        self.deliveries = Deliveries()
        self.num_tokens = self.num_cached_tokens = 0
        self.queued_s = 0.0
        self.reason = "disconnect"  # if its caller leaves

    def place(self, index: int, engine_id: str) -> None:
        now_s = asyncio.get_running_loop().time()
        self.deliveries.places.append((now_s, index, engine_id))

    def note(self, chunk: TokenChunk) -> None:
        if chunk.tokens or chunk.pooled:
            now_s = asyncio.get_running_loop().time()
            self.deliveries.tokens.append((now_s, len(chunk.tokens), 0, chunk.num_steps))
        self.num_tokens += len(chunk.tokens)
        self.num_cached_tokens += chunk.num_cached_tokens
        self.queued_s = max(self.queued_s, chunk.queued_s)
        if chunk.finish_reason is not None:
            self.reason = chunk.finish_reason.value


@contextmanager
def _counted(
    events: ApiEvents, request: GenerationRequest, endpoint: str
) -> Iterator[tuple[_Call, GenerationRequest]]:
    """The call, and its request to be sent; telemetry is told of both ends, as by the API."""
    call, clock = _Call(), asyncio.get_running_loop().time
    info = RequestInfo(
        request.request_id,
        endpoint,
        request.tenant,
        request.pooling is None,
        len(request.prompt),
        1,
        objective=request.objective,
    )
    events.on_request_start(info, clock(), call.deliveries)
    status = 200
    try:
        yield call, replace(request, placed=call.place)
    except Exception as error:  # of any type: what is counted must say that it failed
        failure = from_engine(error)
        status, call.reason = failure.status, failure.code or failure.kind
        raise
    finally:
        num_tokens = 0 if request.pooling is not None else call.num_tokens
        outcome = RequestOutcome(
            status, call.reason, num_tokens, call.num_cached_tokens, call.queued_s
        )
        events.on_finish(info, outcome, clock())


def _conversation(messages: Any) -> list[Mapping[str, Any]]:
    """Any series of them, such as the array that Ray Data makes of a column. Raises ValueError."""
    is_series = isinstance(messages, Iterable) and not isinstance(messages, str | Mapping)
    found = list(messages) if is_series else [messages]
    if not found:
        raise ValueError("messages: must hold at least one")
    if not is_series or not all(isinstance(message, Mapping) for message in found):
        raise ValueError('messages: must be a list of {"role": ..., "content": ...}')
    return found


class HandleCalls:
    """Base of the deployments, which set `models`, by name. Each method takes the name of a `model`
    or adapter; the default is the first model.
    """

    models: Mapping[str, ServedModel]
    telemetry: Mapping[str, ApiEvents] = MappingProxyType({})  # by the same names, if counted

    def _served(self, model: str | None) -> tuple[EngineClient, TextProcessor, ApiEvents]:
        if model is None:
            model = next(iter(self.models))
        for name, (engine, text, adapters) in self.models.items():
            events = self.telemetry.get(name, _UNCOUNTED)
            if name == model:
                return engine, text, events
            if adapters is not None and model in adapters.adapters:
                return adapters.adapters[model], text, events
        raise ValueError(f"model: {model!r} is not served here; {', '.join(self.models)} are")

    async def generate(
        self, prompt: str | list[int], *, model: str | None = None, **params: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Stream token events: {"index", "tokens", "text", "finish_reason"}.

        params: `SamplingParams` fields plus `slo` ({"tbt_ms", "ttft_ms"}), `priority`, `tenant`,
        `ignore_eos`, and `output` (token ids already delivered: generation continues after them).
        With `logprobs`, events also hold "logprobs": a `TokenLogprobs` for each of their tokens;
        with `prompt_logprobs`, "prompt_logprobs": lists that joined have one for each of the
        prompt's tokens, None for the first.
        Raises ValueError naming a bad parameter.
        """
        engine, text_of, telemetry = self._served(model)
        card: ModelCard = engine.card
        ids = await text_of.encode(prompt) if isinstance(prompt, str) else prompt
        tokens = checked_ids(ids, card, "prompt")
        call = parse_params(params, len(tokens), card, text_of.eos_token_ids)
        request = GenerationRequest(
            request_id=f"handle-{uuid.uuid4().hex}",
            prompt=tokens,
            sampling=call.sampling,
            tenant=call.tenant,
            priority=call.priority,
            objective=call.objective,
            output=call.output,
        )
        detokenizer = text_of.detokenizer((*tokens, *call.output))
        with _counted(telemetry, request, "handle.generate") as (counted, sent):
            async with aclosing(engine.generate(sent)) as chunks:
                async for chunk in chunks:
                    counted.note(chunk)
                    shown = chunk.tokens
                    if is_ended_by_token(chunk, call.sampling.stop_token_ids):
                        shown = shown[:-1]
                    text = detokenizer.push(shown)
                    if chunk.finish_reason is not None:
                        text += detokenizer.flush()
                    event: dict[str, Any] = {
                        "index": chunk.first,
                        "tokens": chunk.tokens,
                        "text": text,
                        "finish_reason": chunk.finish_reason,
                    }
                    for name in ("logprobs", "prompt_logprobs"):
                        if getattr(call.sampling, name) is not None:
                            event[name] = getattr(chunk, name)
                    yield event

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], *, model: str | None = None, **params: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Like `generate`, for the answer to a conversation: [{"role", "content"}, ...]."""
        conversation = _conversation(messages)
        text_of = self._served(model)[1]
        try:
            prompt = await text_of.render_chat(conversation)
        except (ConversationInvalid, TemplateMissing, TypeError) as error:  # the last: no JSON
            raise ValueError(f"messages: {error}") from error
        except TemplateBusy as error:
            raise EngineUnavailable(str(error)) from error
        except TemplateError as error:  # the template's own fault
            raise EngineError(str(error)) from error
        tokens = await text_of.encode(prompt, add_special_tokens=False)
        async with aclosing(self.generate(tokens, model=model, **params)) as events:
            async for event in events:
                yield event

    async def embed(
        self,
        prompt: str | list[int],
        *,
        pooling: str | None = None,
        normalize: bool = True,
        model: str | None = None,
    ) -> list[float]:
        """A hidden state of the model as a vector. pooling: mean or last; None: as its folder says,
        else mean."""
        engine, text, telemetry = self._served(model)
        pooling = pooling or text.pooling
        if pooling is None:
            raise ValueError("pooling: this model's own is not supported: mean or last")
        if pooling not in ("mean", "last"):
            raise ValueError(f"pooling: mean or last, not {pooling!r}")
        card: ModelCard = engine.card
        if not card.supports_embeddings:
            raise ValueError("this model gives no embeddings")
        ids = await text.encode(prompt) if isinstance(prompt, str) else prompt
        tokens = checked_ids(ids, card, "prompt")
        parse_params({}, len(tokens), card)  # raises for an invalid length
        request = GenerationRequest(
            request_id=f"handle-{uuid.uuid4().hex}",
            prompt=tokens,
            sampling=SamplingParams(max_tokens=1),
            pooling=pooling,
        )
        vector: tuple[float, ...] = ()
        with _counted(telemetry, request, "handle.embed") as (counted, sent):
            async with aclosing(engine.generate(sent)) as chunks:
                async for chunk in chunks:
                    counted.note(chunk)
                    vector = chunk.pooled or vector
            if not vector:
                raise EngineError("the engine gave no embedding")
        return list(normalized(vector) if normalize else vector)

    async def status(self, model: str | None = None) -> Mapping[str, Any]:
        """A snapshot of the engine; raises EngineUnavailable while it is being rebuilt."""
        engine = self._served(model)[0]
        if not engine.is_ready():
            raise EngineUnavailable("the engine is being rebuilt")
        return await engine.status()
