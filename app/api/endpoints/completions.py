"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence

from app.api.context import Context, as_list, new_id, objective_of, tokenized
from app.api.endpoints.completion_writer import CompletionWriter
from app.api.generation import Generation
from app.api.http.call import Call
from app.api.http.errors import invalid
from app.api.sampling_params import (
    checked_grammar,
    requested_grammar,
    sampling_params,
    stop_strings,
)
from app.api.schema.completions import CompletionRequest
from app.api.sse import stream_reply
from app.engine.client import GenerationRequest
from app.text.incremental import TextRules

_DEFAULT_MAX_TOKENS = 16


class Completions:
    """Handler of one request to `/v1/completions`."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def __call__(self, call: Call) -> None:
        body = await call.read_json(CompletionRequest)
        context = self._context.of(body.model)
        given = as_list(body.prompt, "prompt", context.options.max_prompts)
        prompts = await tokenized(given, context, "prompt")
        echoes = await _echoes(context, given) if body.echo else []
        n, best_of = _counts(body, context, len(prompts))
        stream = bool(body.stream)
        grammar, grammar_param = requested_grammar(body)
        grammar = await checked_grammar(grammar, context, grammar_param)
        _check_logprobs(body, context, best_of, prompts)
        wanted = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        if wanted == 0 and not body.echo:
            raise invalid("max_tokens is 0 and echo is off: there is nothing to do.", "max_tokens")
        completion_id = new_id("cmpl")
        requests = []
        for number, prompt in enumerate(prompts):
            room = context.engine.card.max_model_len - len(prompt)
            sampling = sampling_params(
                body,
                context,
                max_tokens=min(max(wanted, 1), room),
                logprobs=_engine_logprobs(body, best_of > n),
                prompt_logprobs=body.logprobs if body.echo else None,
                grammar=grammar,
            )
            requests.append(
                GenerationRequest(
                    request_id=f"{completion_id}-{number}",
                    prompt=tuple(prompt),
                    sampling=sampling,
                    n=best_of,
                    tenant=call.tenant(body.user),
                    cache_salt=call.cache_salt(body.user),
                    priority=call.check_priority(body.priority),
                    objective=objective_of(body),
                )
            )
        rules = TextRules(
            stops=stop_strings(body, context),
            stop_token_ids=frozenset(requests[0].sampling.stop_token_ids),
            skip_special_tokens=body.skip_special_tokens is not False,
        )
        call.admit_tokens(sum(len(prompt) for prompt in prompts))
        generation = Generation(context, call, requests, rules, stream=stream)
        answer = CompletionWriter(
            context, body, completion_id, generation, n, best_of, prompts, echoes
        )
        if stream:
            await stream_reply(call, generation, answer)
        else:
            await answer.reply(call)


async def _echoes(context: Context, given: Sequence[str | list[int]]) -> list[str]:
    """The prompts' texts, to stand before the continuations."""
    return [
        prompt if isinstance(prompt, str) else await context.text.decode_aside(prompt)
        for prompt in given
    ]


def _check_logprobs(
    body: CompletionRequest, context: Context, best_of: int, prompts: Sequence[Sequence[int]]
) -> None:
    if body.logprobs is None:
        return
    if body.logprobs > context.options.max_logprobs:
        raise invalid(f"At most {context.options.max_logprobs} are allowed.", "logprobs")
    wanted = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    limit = context.engine.card.max_model_len
    num_tokens = sum(
        (len(prompt) if body.echo else 0) + (0 if body.stream else min(wanted, limit - len(prompt)))
        for prompt in prompts
    )
    context.check_entries(best_of * num_tokens * (1 + body.logprobs), "logprobs")


def _counts(body: CompletionRequest, context: Context, num_prompts: int) -> tuple[int, int]:
    options = context.options
    n = body.n or 1
    best_of = n if body.best_of is None else body.best_of
    if best_of < n:
        raise invalid("best_of must be at least n.", "best_of")
    if best_of > options.max_n:
        raise invalid(f"At most {options.max_n} are allowed.", "n" if n == best_of else "best_of")
    if best_of > n and body.stream:
        raise invalid("best_of cannot be streamed: the best is known at the end.", "best_of")
    if num_prompts * best_of > options.max_continuations:
        raise invalid(
            f"Prompts times continuations may not exceed {options.max_continuations}.", "n"
        )
    return n, best_of


def _engine_logprobs(body: CompletionRequest, choosing: bool) -> int | None:
    """best_of chooses by log-probability, so it needs the sampled token's at least."""
    if body.logprobs is None:
        return 0 if choosing else None
    return body.logprobs
