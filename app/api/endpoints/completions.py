"""`POST /v1/completions`, answered whole or as events."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from typing import Any

from actors.scheduling.request import Grammar, SamplingParams
from app.api.context import Context, as_list, new_id, tokenized
from app.api.endpoints.large import listed_wholes, whole
from app.api.endpoints.logprobs import (
    CompletionColumns,
    Entries,
    check_logprobs,
    completion_logprobs,
)
from app.api.generation import Generation, generation_request, usage_of
from app.api.http.call import Call
from app.api.http.errors import invalid
from app.api.sampling_params import (
    check_continuations,
    checked_grammar,
    requested_grammar,
    sampling_params,
    stop_strings,
)
from app.api.schema.completions import CompletionRequest
from app.api.sse import ChoiceWriter, stream_reply
from app.text.incremental import TextDelta, TextRules

_DEFAULT_MAX_TOKENS = 16
_BEFORE, _AFTER = '"text":', ',"logprobs":null,"finish_reason":null'  # of an event of mere text


class Completions:
    """Handler of one request to `/v1/completions`."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def __call__(self, call: Call) -> None:
        body = await call.read_json(CompletionRequest)
        context = self._context.of(body.model)
        given = as_list(body.prompt, "prompt", context.options.max_prompts, "api.max_prompts")
        prompts = await tokenized(given, context, "prompt")
        skip_special_tokens = body.skip_special_tokens is not False
        echoes = await _echoes(context, given, skip_special_tokens) if body.echo else []
        n, best_of = _n_and_best_of(body, context, len(prompts))
        grammar, grammar_param = requested_grammar(body)
        grammar = await checked_grammar(grammar, context, grammar_param, call.key_name)
        new_tokens = _new_tokens(body, context, prompts, best_of)
        completion_id = new_id("cmpl")
        requests = []
        for number, (prompt, num_new) in enumerate(zip(prompts, new_tokens, strict=True)):
            sampling = _sampling(body, context, num_new, best_of > n, grammar)
            request_id = f"{completion_id}-{number}"
            requests.append(generation_request(call, body, request_id, prompt, sampling, best_of))
        rules = TextRules(
            stops=stop_strings(body, context),
            stop_token_ids=frozenset(requests[0].sampling.stop_token_ids),
            skip_special_tokens=skip_special_tokens,
            min_tokens=body.min_tokens or 0,
        )
        call.admit_tokens(sum(len(prompt) for prompt in prompts))
        generation = Generation(
            context,
            call,
            requests,
            rules,
            stream=bool(body.stream),
            is_mere_echo=body.max_tokens == 0,
        )
        answer = CompletionWriter(
            context, body, completion_id, generation, prompts, echoes, n=n, best_of=best_of
        )
        if body.stream:
            await stream_reply(call, generation, answer)
        else:
            await answer.reply(call)


async def _echoes(
    context: Context, given: Sequence[str | list[int]], skip_special_tokens: bool
) -> list[str]:
    """The prompts' texts, to stand before the continuations."""
    ids = [prompt for prompt in given if not isinstance(prompt, str)]
    texts = await context.text.decode_all(ids, skip_special_tokens=skip_special_tokens)
    decoded = iter(texts)
    return [prompt if isinstance(prompt, str) else next(decoded) for prompt in given]


def _n_and_best_of(body: CompletionRequest, context: Context, num_prompts: int) -> tuple[int, int]:
    options = context.options
    n = body.n or 1
    best_of = n if body.best_of is None else body.best_of
    if best_of < n:
        raise invalid("best_of must be at least n.", "best_of")
    check_continuations(options, best_of, "n" if n == best_of else "best_of")
    if best_of > n and body.stream:
        raise invalid("best_of cannot be streamed: the best is known at the end.", "best_of")
    if num_prompts * best_of > options.max_continuations:
        raise invalid(
            f"Prompts times continuations may not exceed {options.max_continuations} "
            "(setting api.max_continuations).",
            "n",
        )
    return n, best_of


def _new_tokens(
    body: CompletionRequest, context: Context, prompts: Sequence[Sequence[int]], best_of: int
) -> list[int]:
    """New tokens of the continuations of each prompt; 0: the prompts alone.

    Raises 400 if nothing is wanted, more than the context leaves, or more log-probabilities than
    this server gives.
    """
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens is 0 and echo is off: there is nothing to do.", "max_tokens")
    new_tokens = [
        context.new_tokens(len(prompt), body.max_tokens, "max_tokens") for prompt in prompts
    ]
    if body.max_tokens is None:
        new_tokens = [min(num_new, _DEFAULT_MAX_TOKENS) for num_new in new_tokens]
    if body.logprobs is not None:
        echoed = sum(map(len, prompts)) if body.echo else 0
        new = 0 if body.stream else sum(new_tokens)
        check_logprobs(context, body.logprobs, best_of * (echoed + new))
    return new_tokens


def _sampling(
    body: CompletionRequest,
    context: Context,
    num_new_tokens: int,
    chooses: bool,
    grammar: Grammar | None,
) -> SamplingParams:
    """chooses: the best continuations will be chosen, by the log-probabilities of their tokens."""
    return sampling_params(
        body,
        context,
        max_tokens=max(num_new_tokens, 1),
        logprobs=0 if body.logprobs is None and chooses else body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        grammar=grammar,
    )


class CompletionWriter(ChoiceWriter):
    """Writes the answer of one completion request, whole or as events."""

    def __init__(
        self,
        context: Context,
        body: CompletionRequest,
        completion_id: str,
        generation: Generation,
        prompts: Sequence[Sequence[int]],
        echoes: Sequence[str],
        *,
        n: int,
        best_of: int,
    ) -> None:
        name = context.engine.card.name
        super().__init__(generation, completion_id, "text_completion", name, body.stream_options)
        self._context = context
        self._body = body
        self._n = n
        self._best_of = best_of
        self._prompts = prompts
        self._echoes = echoes
        is_mere_text = not echoes and body.logprobs is None
        self._is_bare = is_mere_text and not self._counts_each
        self._opened: set[int] = set()
        self._echoed: dict[int, CompletionColumns] = {}  # of prompts, once they are written
        self._num_logprobs = [0] * len(generation.streams)
        self._sums = [0.0] * len(generation.streams)  # of these
        if self._is_bare:
            for index in range(len(generation.streams)):
                self.templates[index] = self.template(index, _BEFORE, _AFTER)

    # ---- events -----------------------------------------------------------------------

    def write(self, delta: TextDelta) -> bytes:
        text, entries, index = delta.text, delta.entries, delta.index
        reason = delta.finish_reason
        if self._is_bare and reason is None:
            return self.write_text(index, text)
        if self._echoes and index not in self._opened:
            self._opened.add(index)
            prompt = self._prompt_of(index)
            columns = self._columns()
            columns.add(entries, len(self._echoes[prompt]))
            return self._first_event(index, self._echoes[prompt] + text, reason, columns, prompt)
        return self._event(index, text, reason, self._logprobs(index, entries))

    async def prepare(self, delta: TextDelta) -> None:
        if self._echoes and delta.index not in self._opened:
            await self._read_prompt(self._prompt_of(delta.index))

    def _first_event(
        self, index: int, text: str, reason: str | None, columns: CompletionColumns, prompt: int
    ) -> bytes:
        """A continuation's first event, with its prompt's log-probabilities."""
        choice = {"index": index, "text": text, "finish_reason": reason}
        written = whole(choice, logprobs=self._written(prompt, columns))
        chunk = whole(self._chunk(), choices=listed_wholes([written]))
        return b"".join([b"data: ", *chunk, b"\n\n"])

    def _event(self, index: int, text: str, reason: str | None, logprobs: Any) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return self.choice_event(choice)

    # ---- whole ------------------------------------------------------------------------

    async def reply(self, call: Call) -> None:
        """Gather everything and send it."""
        count = len(self._generation.streams)
        texts: list[list[str]] = [[] for _ in range(count)]
        columns = [self._columns() for _ in range(count)]
        reasons: list[str | None] = [None] * count
        async with call.watch_client() as watch:
            async with aclosing(self._generation.deltas()) as deltas:
                async for delta in deltas:
                    index = delta.index
                    texts[index].append(delta.text)
                    reasons[index] = delta.finish_reason
                    self._add_logprobs(index, delta.entries)
                    if self._body.logprobs is not None:
                        columns[index].add(delta.entries, self._offset(self._prompt_of(index)))
            watch.stop()
            choices: list[Iterator[bytes]] = []
            for prompt in range(len(self._prompts)):
                await self._read_prompt(prompt)
                for index in self._chosen(prompt):
                    text = "".join(texts[index])
                    choice = {
                        "index": len(choices),
                        "text": (self._echoes[prompt] if self._echoes else "") + text,
                        "finish_reason": reasons[index],
                    }
                    written = self._written(prompt, columns[index])
                    choices.append(whole(choice, logprobs=written))
            answer = {**self._head, "usage": self._usage()}
            await call.reply(200, list(whole(answer, choices=listed_wholes(choices))))

    def _add_logprobs(self, index: int, entries: Entries) -> None:
        """Keep what choosing the best needs."""
        self._sums[index] += math.fsum(entry.logprob for entry, _ in entries)
        self._num_logprobs[index] += len(entries)

    def _chosen(self, prompt: int) -> Sequence[int]:
        """Which continuations of a prompt are returned: all, or the likeliest by mean."""
        candidates = range(prompt * self._best_of, (prompt + 1) * self._best_of)
        if self._best_of == self._n:
            return candidates

        def mean_logprob(index: int) -> float:
            num = self._num_logprobs[index]
            return self._sums[index] / num if num else -math.inf

        return sorted(candidates, key=mean_logprob, reverse=True)[: self._n]

    # ---- both -------------------------------------------------------------------------

    def _prompt_of(self, index: int) -> int:
        return index // self._best_of  # of a stream this is n

    def _usage(self) -> dict[str, object]:
        return usage_of(self._generation)

    def _columns(self) -> CompletionColumns:
        return CompletionColumns(self._context.text, self._body.logprobs or 0)

    async def _read_prompt(self, prompt: int) -> None:
        """Write the log-probabilities of an echoed prompt, once for all of its continuations."""
        if not self._echoes or self._body.logprobs is None or prompt in self._echoed:
            return
        found = self._generation.prompt_logprobs[prompt]
        tokens = self._prompts[prompt]
        padded = [*found, *([None] * (len(tokens) - len(found)))]
        columns = self._columns()
        await columns.add_prompt(list(zip(tokens, padded, strict=False)), self._echoes[prompt])
        self._echoed[prompt] = columns

    def _written(self, prompt: int, columns: CompletionColumns) -> Iterator[bytes]:
        """The `logprobs` of a whole continuation, its echoed prompt's first."""
        if self._body.logprobs is None:
            return iter((b"null",))
        return self._echoed.get(prompt, self._columns()).followed_by(columns)

    def _offset(self, prompt: int) -> int:
        return len(self._echoes[prompt]) if self._echoes else 0

    def _logprobs(self, index: int, entries: Entries) -> dict[str, Any] | None:
        """Log-probabilities of an event after the first."""
        num_top = self._body.logprobs
        if num_top is None:
            return None
        offset = self._offset(self._prompt_of(index))
        return completion_logprobs(self._context.text, entries, num_top, offset)
