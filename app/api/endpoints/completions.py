"""`POST /v1/completions`."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from actors.scheduling.plan import TokenLogprobs
from app.api.context import Context, as_list, new_id, objective_of, tokenized
from app.api.endpoints.logprobs import completion_logprobs
from app.api.generation import Generation, usage_of
from app.api.http.call import Call
from app.api.http.errors import invalid
from app.api.sampling_params import (
    checked_grammar,
    requested_grammar,
    sampling_params,
    stop_strings,
)
from app.api.schema.completions import CompletionRequest
from app.api.sse import StreamWriter, event, last_event, stream_reply
from app.engine.client import GenerationRequest
from app.text.incremental import TextDelta, TextRules

_DEFAULT_MAX_TOKENS = 16


_PLAIN_END = ',"logprobs":null,"finish_reason":null}]}\n\n'  # of the event of mere text


class Completions:
    """Handler of one request to `/v1/completions`."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def __call__(self, call: Call) -> None:
        context = self._context
        body = await call.read_json(CompletionRequest)
        context.check_model(body.model)
        given = as_list(body.prompt, "prompt", context.options.max_prompts)
        prompts = await tokenized(given, context, "prompt")
        echoes = _echoes(context, given) if body.echo else []
        n, best_of = _counts(body, context, len(prompts))
        stream = bool(body.stream)
        grammar, grammar_param = requested_grammar(body)
        grammar = await checked_grammar(grammar, context, grammar_param)
        wants_logprobs = body.logprobs is not None
        if wants_logprobs and (body.logprobs or 0) > context.options.max_logprobs:
            raise invalid(f"At most {context.options.max_logprobs} are allowed.", "logprobs")
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
                prompt_logprobs=body.logprobs if body.echo and wants_logprobs else None,
                grammar=grammar,
            )
            requests.append(
                GenerationRequest(
                    request_id=f"{completion_id}-{number}",
                    prompt=tuple(prompt),
                    sampling=sampling,
                    n=best_of,
                    tenant=call.tenant(body.user),
                    priority=body.priority or 0,
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
            await stream_reply(call, context, generation, answer)
        else:
            await answer.reply(call)


def _echoes(context: Context, given: Sequence[str | list[int]]) -> list[str]:
    """The prompts' texts, to stand before the continuations."""
    return [prompt if isinstance(prompt, str) else context.text.decode(prompt) for prompt in given]


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


class CompletionWriter(StreamWriter):
    """Writes the answer of one completion request, whole or as events."""

    def __init__(
        self,
        context: Context,
        body: CompletionRequest,
        completion_id: str,
        generation: Generation,
        n: int,
        best_of: int,
        prompts: Sequence[Sequence[int]],
        echoes: Sequence[str],
    ) -> None:
        super().__init__(len(generation.streams))
        self._context = context
        self._body = body
        self._generation = generation
        self._n = n
        self._best_of = best_of
        self._prompts = prompts
        self._echoes = echoes
        self._head: dict[str, Any] = {
            "id": completion_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": context.engine.card.name,
        }
        self._only_echo = body.max_tokens == 0
        self._is_bare = not echoes and not self._only_echo and body.logprobs is None
        self._opened: set[int] = set()
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)
        opening = event(self._head)[:-3].decode()  # without the closing brace and blank line
        usage = ',"usage":null' if self._include_usage else ""
        if self._is_bare:
            for index in range(len(generation.streams)):
                prefix = f'{opening}{usage},"choices":[{{"index":{index},"text":'
                self.templates[index] = (prefix, _PLAIN_END)

    # ---- events -----------------------------------------------------------------------

    def write(self, delta: TextDelta) -> bytes:
        text, entries, index = delta.text, delta.entries, delta.index
        if self._is_bare and delta.finish_reason is None:
            return self.write_text(index, text)
        if self._only_echo:
            text, entries = "", []
        if self._echoes and index not in self._opened:
            self._opened.add(index)
            return self._event(
                index,
                self._echoes[index // self._n] + text,
                delta.finish_reason,
                self._logprobs(index, entries, self._prompt_entries(index // self._n)),
            )
        logprobs = self._logprobs(index, entries, None) if self._body.logprobs is not None else None
        return self._event(index, text, delta.finish_reason, logprobs)

    def _event(self, index: int, text: str, reason: str | None, logprobs: Any) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        content = {**self._head, "choices": [choice]}
        if self._include_usage:
            content["usage"] = None
        return event(content)

    def closing(self) -> bytes:
        """Usage and timing, when asked for."""
        options = self._body.stream_options
        return last_event(self._head, options, self._usage(), self._generation)

    # ---- whole ------------------------------------------------------------------------

    async def reply(self, call: Call) -> None:
        """Gather everything and send it."""
        count = len(self._generation.streams)
        texts: list[list[str]] = [[] for _ in range(count)]
        entries: list[list[tuple[TokenLogprobs, int]]] = [[] for _ in range(count)]
        reasons: list[str | None] = [None] * count
        async with call.watch_client() as watch:
            async with aclosing(self._generation.deltas()) as deltas:
                async for delta in deltas:
                    texts[delta.index].append(delta.text)
                    entries[delta.index].extend(delta.entries)
                    reasons[delta.index] = delta.finish_reason
            watch.stop()
            choices: list[dict[str, Any]] = []
            for prompt in range(len(self._prompts)):
                for index in self._chosen(prompt, entries):
                    own = [] if self._only_echo else entries[index]
                    text = "" if self._only_echo else "".join(texts[index])
                    logprobs = None
                    if self._body.logprobs is not None:
                        before = self._prompt_entries(prompt) if self._echoes else None
                        logprobs = self._logprobs(prompt * self._n, own, before)
                    if self._echoes:
                        text = self._echoes[prompt] + text
                    choices.append(
                        {
                            "index": len(choices),
                            "text": text,
                            "logprobs": logprobs,
                            "finish_reason": "length" if self._only_echo else reasons[index],
                        }
                    )
            await call.reply_json({**self._head, "choices": choices, "usage": self._usage()})

    def _chosen(
        self, prompt: int, entries: Sequence[Sequence[tuple[TokenLogprobs, int]]]
    ) -> Sequence[int]:
        """Which continuations of a prompt are returned: all, or the likeliest by mean."""
        candidates = range(prompt * self._best_of, (prompt + 1) * self._best_of)
        if self._best_of == self._n:
            return candidates

        def mean_logprob(index: int) -> float:
            own = entries[index]
            return math.fsum(entry.logprob for entry, _ in own) / len(own) if own else -math.inf

        return sorted(candidates, key=mean_logprob, reverse=True)[: self._n]

    # ---- both -------------------------------------------------------------------------

    def _usage(self) -> dict[str, object]:
        usage = usage_of(self._generation)
        if self._only_echo:  # the engine had to draw one token that was not asked for
            usage["completion_tokens"] = 0
            usage["total_tokens"] = usage["prompt_tokens"]
        return usage

    def _prompt_entries(self, prompt: int) -> list[tuple[int, TokenLogprobs | None]]:
        found = self._generation.prompt_logprobs[prompt]
        tokens = self._prompts[prompt]
        padded = [*found, *([None] * (len(tokens) - len(found)))]
        return list(zip(tokens, padded, strict=False))

    def _logprobs(
        self,
        index: int,
        entries: Sequence[tuple[TokenLogprobs, int]],
        prompt: Sequence[tuple[int, TokenLogprobs | None]] | None,
    ) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        offset = len(self._echoes[index // self._n]) if self._echoes else 0
        return completion_logprobs(self._context.text, entries, prompt, self._body.logprobs, offset)
