"""The objects that handlers share, collected once when the application is built."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from actors.scheduling.request import Objective
from app.api.events import ApiEvents
from app.api.http.errors import ApiError, invalid
from app.api.http.options import ApiOptions
from app.api.schema.common import ScheduleFields
from app.api.schema.other import SloQuoteRequest
from app.engine_client.client import AdapterControl, EngineClient
from app.text.processor import TextProcessor

GivenPrompts = str | list[int] | list[str] | list[list[int]]


@dataclass(slots=True)
class Running:
    """The number of generating HTTP requests in this replica, over all models, and the answers with
    an error since its start, by status and code."""

    num_requests: int = 0
    errors: Counter[tuple[int, str]] = field(default_factory=Counter)


@dataclass(slots=True)
class Context:
    """The application's parts for one model. models: every one behind this address by its name,
    this one among them; empty where it is alone. adapters: of this model; each is a model as well.
    """

    engine: EngineClient
    text: TextProcessor
    options: ApiOptions
    events: ApiEvents = field(default_factory=ApiEvents)
    running: Running = field(default_factory=Running)
    models: dict[str, Context] = field(default_factory=dict)
    adapters: AdapterControl | None = None

    @property
    def every(self) -> Mapping[str, Context]:
        """The contexts of all models, by name; raises EngineUnavailable for one without a card."""
        return self.models or {self.engine.card.name: self}

    def of(self, name: str | None) -> Context:
        """The context of this model or adapter; without a name, of the first model. Raises 404 for
        an unknown name."""
        if name is None:
            return self
        if name in self.every:
            return self.every[name]
        for base in self.every.values():
            if base.adapters is not None and name in base.adapters.adapters:
                return replace(base, engine=base.adapters.adapters[name])
        raise ApiError(
            404,
            f"The model '{name[:128]}' does not exist here. GET /v1/models lists those that do.",
            "model",
            "model_not_found",
        )

    def check_length(self, num_chars: int, param: str) -> None:
        """Raises 400 for a text that is too long in any case, before it is tokenized."""
        if self.text.surely_exceeds(num_chars, self.engine.card.max_model_len):
            raise invalid(
                f"The prompt is too long: it has {num_chars} characters, and this model's maximum "
                f"context length is {self.engine.card.max_model_len} tokens.",
                param,
                "context_length_exceeded",
            )

    def check_prompt(self, prompt: Sequence[int], param: str) -> None:
        """Raises 400 unless these token ids are a prompt that this model can continue."""
        if not prompt:
            raise invalid("The prompt is empty: give at least one token.", param, "empty_prompt")
        self.check_num_prompt_tokens(len(prompt), param)
        self.check_ids(prompt, param)

    def check_num_prompt_tokens(self, num_prompt_tokens: int, param: str) -> None:
        """Raises 400 where no token can follow. Clients know it by these words: Anthropic's by the
        first sentence, from whose numbers they compute what to leave out of a conversation, and
        OpenAI's by the second."""
        limit = self.engine.card.max_model_len
        if num_prompt_tokens >= limit:
            raise invalid(
                f"The prompt is too long: {num_prompt_tokens} tokens > {limit - 1} maximum. This "
                f"model's maximum context length is {limit} tokens, the answer included.",
                param,
                "context_length_exceeded",
            )

    def new_tokens(self, num_prompt_tokens: int, wanted: int | None, param: str) -> int:
        """Most tokens to generate: those wanted, else what the context leaves. Raises 400 where it
        leaves fewer: a shorter answer would look as if the caller's own limit had ended it."""
        limit = self.engine.card.max_model_len
        if wanted is None:
            return limit - num_prompt_tokens
        if num_prompt_tokens + wanted > limit:
            raise invalid(
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{num_prompt_tokens + wanted} tokens ({num_prompt_tokens} in the prompt, "
                f"{wanted} in the completion). Lower {param} to {limit - num_prompt_tokens} or "
                "less, leave it out, or shorten the prompt.",
                param,
                "context_length_exceeded",
            )
        return wanted

    def check_ids(self, tokens: Sequence[int], param: str) -> None:
        """Raises 400 for a token id outside the vocabulary."""
        vocab_size = self.engine.card.vocab_size
        highest = max(tokens, default=0)
        if highest >= vocab_size:
            raise invalid(
                f"Token id {highest} is outside the vocabulary of {vocab_size}.",
                param,
                "invalid_value",
            )

    def check_logprob_entries(self, num_entries: int, param: str) -> None:
        """Raises 400 for an answer that may hold too many log-probabilities."""
        limit = self.options.max_logprob_entries
        if num_entries > limit:
            raise invalid(
                f"The answer may hold {num_entries} log-probabilities (tokens, and alternatives "
                f"of each); at most {limit} are allowed (setting api.max_logprob_entries): ask for "
                "fewer, or stream them.",
                param,
                "too_many_logprobs",
            )

    def begin(self) -> None:
        """Count a started HTTP request; raises 429 at this replica's limit."""
        if self.running.num_requests >= self.options.max_concurrent_requests:
            raise ApiError(
                429, "Too many requests are running.", code="overloaded", retry_after_s=1.0
            )
        self.running.num_requests += 1

    def end(self) -> None:
        """Count an ended HTTP request."""
        self.running.num_requests -= 1


def as_list(given: GivenPrompts, param: str, limit: int, setting: str) -> list[str | list[int]]:
    """Every prompt by itself; raises 400 for none, or for more than the limit of this setting."""
    prompts: list[str | list[int]]
    if isinstance(given, str):
        prompts = [given]
    elif given and isinstance(given[0], int):
        prompts = [[token for token in given if isinstance(token, int)]]
    else:
        prompts = [prompt for prompt in given if not isinstance(prompt, int)]
    if not prompts:
        raise invalid(f"'{param}' is empty.", param, "empty_prompt")
    if len(prompts) > limit:
        raise invalid(f"At most {limit} {param}s are allowed (setting {setting}).", param)
    return prompts


async def tokenized(
    prompts: Sequence[str | list[int]], context: Context, param: str
) -> list[list[int]]:
    """Token ids of every prompt, checked against the model's vocabulary and context."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    for text in texts:
        context.check_length(len(text), param)
    encoded = iter(await context.text.encode_all(texts))
    found = [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]
    for tokens in found:
        context.check_prompt(tokens, param)
    return found


def objective_of(request: ScheduleFields | SloQuoteRequest) -> Objective:
    """The request's own latency objectives in seconds."""
    slo = request.slo
    if slo is None:
        return Objective()
    return Objective(
        tbt_s=None if slo.tbt_ms is None else slo.tbt_ms / 1e3,
        ttft_s=None if slo.ttft_ms is None else slo.ttft_ms / 1e3,
    )


def new_id(kind: str) -> str:
    """A fresh object id such as `chatcmpl-...`."""
    return f"{kind}-{secrets.token_hex(12)}"
