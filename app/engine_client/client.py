"""The one thing the API knows of the engine: a client that streams token chunks.

`app.api` is written against this protocol, so it runs unchanged over the live scheduler actor
and over a hand-computable engine in the tests. No Ray, no torch.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from actors.scheduling.interfaces import Quote
from actors.scheduling.plan import TokenLogprobs
from actors.scheduling.request import FinishReason, Objective, SamplingParams


class EngineError(Exception):
    """Base of what the engine may raise to the API.

    EngineError
     ├── RequestRefused   over a limit or no promise can be kept (400, or 429 with retry_after_s)
     ├── EngineUnavailable  not ready, draining or rebuilding for too long (503)
     └── GenerationFailed   the request itself broke the engine (500)
    """


class RequestRefused(EngineError):
    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s


class EngineUnavailable(EngineError):
    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class GenerationFailed(EngineError):
    pass


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
    cache_salt: str | None = None  # whose cached prefixes it may find; None: its tenant's
    adapter: int = 0  # as of `actors.scheduling.request.Request`
    # Called with a continuation and the engine that computes it from now on, where there are many.
    placed: Callable[[int, str], None] | None = field(default=None, compare=False)


@dataclass(slots=True)
class TokenChunk:
    """What is new of one continuation since the last chunk.

    index: which continuation (0 <= index < n). first: number of its first token here.
    Several iterations' tokens arrive as one chunk when the reader is slow. queued_s: arrival to
    its first plan, on the first chunk.
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


class TokenSink(Protocol):
    """Where plain tokens (no end, no log-probabilities) go without waking their reader."""

    def write(self, index: int, tokens: Sequence[int]) -> bool:
        """Take tokens of continuation `index` now, or return False: they come as a chunk."""
        ...


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What clients may know of the served model."""

    name: str
    path: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    created_s: int
    supports_embeddings: bool = True
    parent: str | None = None  # of an adapter: the model that it changes


class EngineClient(Protocol):
    """All methods run on the replica's event loop."""

    @property
    def card(self) -> ModelCard: ...

    def generate(
        self, request: GenerationRequest, sink: TokenSink | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        """Stream chunks until every continuation has a finish_reason.

        Plain tokens that come while the caller waits for a chunk may go to `sink` instead. What
        it raises, the caller gets.

        Closing the generator (or cancelling its task) aborts and frees the KV blocks.
        Raises EngineError subclasses, before the first chunk where possible.
        """
        ...

    def finish_early(self, request_id: str, index: int) -> None:
        """End one continuation of a running request (its stop string was found).

        Its further tokens are not wanted; an engine may still send some. The other
        continuations go on. Unknown ids are ignored: races are normal.
        """
        return

    def is_ready(self) -> bool:
        """True once the stages are loaded and the pipeline answers."""
        ...

    async def status(self) -> Mapping[str, Any]:
        """A snapshot for the console and /metrics: plain JSON-able data."""
        ...

    async def quote(
        self, num_prompt_tokens: int, max_tokens: int, objective: Objective, tenant: str
    ) -> Quote:
        """What would become of such a request if it were submitted now; reserves nothing."""
        ...

    def subscribe_iterations(self) -> AsyncGenerator[list[Mapping[str, Any]], None]:
        """Iteration records (plain JSON-able), batched, for the console's live timeline."""
        ...

    async def reconfigure(self, changes: Mapping[str, Any]) -> None:
        """Change scheduling settings live; raises RequestRefused naming a bad key."""
        ...


class AdapterControl(Protocol):
    """An engine's adapters, which are loaded and unloaded while it serves."""

    @property
    def adapters(self) -> Mapping[str, EngineClient]:
        """By name, what serves each."""
        ...

    async def load_adapter(self, name: str, path: str) -> None:
        """Raises RequestRefused for a name or folder that cannot be, or without a free slot."""
        ...

    def unload_adapter(self, name: str) -> int:
        """Take its name away; its running requests, whose number is returned, go on and keep its
        slot. Raises RequestRefused where no adapter has this name."""
        ...
