"""The API's only interface to the engine: a client that streams token chunks.

`app.api` is written against this protocol, so it runs unchanged over the live scheduler actor
and over a deterministic test engine. No Ray, no torch.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from actors.scheduling.interfaces import Quote, QuoteRequest
from actors.scheduling.plan import TokenLogprobs
from actors.scheduling.request import FinishReason, Objective, SamplingParams


class EngineError(Exception):
    """Base of the errors that the engine raises to the API.

    EngineError
     ├── RequestRefused     over a limit, or its objective cannot be kept (400; to retry: 429),
     │                    or its grammar comes to a dead end (400)
     ├── EngineUnavailable  not ready, draining or rebuilding for too long (503)
     └── GenerationFailed   the request made the engine fail (500)
    """


class RequestRefused(EngineError):
    """param: the field of the request at fault, if one is."""

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s


class EngineUnavailable(EngineError):
    """The same request may succeed after `retry_after_s`."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class GenerationFailed(EngineError):
    """The engine failed at this request, tried alone too."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt, `n` continuations (seeds sampling.seed, seed + 1, ...)."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    tenant: str = ""
    priority: int = 0
    objective: Objective = field(default_factory=Objective)
    pooling: str | None = None
    output: tuple[int, ...] = ()  # already delivered (failover); only with n == 1
    cache_salt: str | None = None  # cached prefixes are shared by equal salts; None: the tenant
    adapter: int = 0  # as in `actors.scheduling.request.Request`
    arrived_s: float | None = None  # by `time.monotonic`; None: as it is submitted
    # In a fleet: called with a continuation's index and the id of its new engine.
    placed: Callable[[int, str], None] | None = field(default=None, compare=False)


@dataclass(slots=True)
class TokenChunk:
    """The new tokens of one continuation since the last chunk.

    index: of the continuation (0 <= index < n). first: position of the chunk's first token. A slow
    reader gets the tokens of several iterations as one chunk. num_steps: how many iterations.
    queued_s: from arrival to the first plan, on the first chunk.
    """

    index: int
    first: int
    tokens: list[int]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    pooled: tuple[float, ...] = ()
    queued_s: float = 0.0
    num_steps: int = 1


class TokenSink(Protocol):
    """Receives plain tokens (no end, no log-probabilities) without waking the reader."""

    def write(self, index: int, tokens: Sequence[int]) -> bool:
        """Take one step's tokens of continuation `index`; False: they must come as a chunk."""
        ...


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The public facts of the served model."""

    name: str
    path: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    created_s: int
    supports_embeddings: bool = True
    parent: str | None = None  # of an adapter: its base model


class EngineClient(Protocol):
    """All methods run on the replica's event loop."""

    @property
    def card(self) -> ModelCard: ...

    def generate(
        self, request: GenerationRequest, sink: TokenSink | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        """Stream chunks until every continuation has a finish_reason.

        Plain tokens that arrive while the caller waits for a chunk may go to `sink` instead; its
        exceptions are raised here.

        Closing the generator (or cancelling its task) aborts and frees the KV blocks.
        Raises EngineError subclasses, before the first chunk where possible.
        """
        ...

    def foreseen(self, request: GenerationRequest) -> RequestRefused | None:
        """The refusal of this request, where an earlier one says it before anything is prepared."""
        return None

    def finish_early(self, request_id: str, index: int) -> None:
        """End one continuation of a running request (its stop string was found).

        Tokens already computed may still arrive. The other continuations go on. Unknown ids are
        ignored, because the request may just have ended.
        """
        ...

    def is_ready(self) -> bool:
        """True once the stages are loaded and the pipeline answers."""
        ...

    async def status(self) -> Mapping[str, Any]:
        """A snapshot for the console and /metrics: plain JSON-able data."""
        ...

    async def quote(self, asked: QuoteRequest) -> Quote:
        """The prediction for such a request if it were submitted now; reserves nothing."""
        ...

    def subscribe_iterations(self) -> AsyncGenerator[list[Mapping[str, Any]], None]:
        """Iteration records (plain JSON-able), batched, for the console's live timeline."""
        ...

    async def reconfigure(self, changes: Mapping[str, Any]) -> None:
        """Change scheduling settings live; raises RequestRefused naming a bad key."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget all cached KV: no request finds what was computed before. Running ones go on."""
        ...


class AdapterControl(Protocol):
    """Loads and unloads the adapters of a running engine."""

    @property
    def adapters(self) -> Mapping[str, EngineClient]:
        """The engine client of each adapter, by name."""
        ...

    async def load_adapter(self, name: str, path: str) -> None:
        """Raises RequestRefused for an invalid name or folder, or if no slot is free."""
        ...

    async def unload_adapter(self, name: str) -> int:
        """Remove the name; returns the number of running requests, which go on and keep the slot.

        Raises RequestRefused if there is no such adapter.
        """
        ...
