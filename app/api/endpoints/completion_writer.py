"""The answer of /v1/completions, whole or as events."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from typing import Any

from app.api.context import Context
from app.api.endpoints.large import listed_wholes, whole
from app.api.endpoints.logprobs import CompletionColumns, Entries, completion_logprobs
from app.api.generation import Generation, usage_of
from app.api.http.call import Call
from app.api.schema.completions import CompletionRequest
from app.api.sse import StreamWriter, event, last_event
from app.text.incremental import TextDelta

_PLAIN_END = ',"logprobs":null,"finish_reason":null}]}\n\n'  # of the event of mere text


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
        self._echoed: dict[int, CompletionColumns] = {}  # of prompts, once they are written
        self._sums = [0.0] * len(generation.streams)  # of log-probabilities
        self._counts = [0] * len(generation.streams)
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
            prompt = index // self._n
            columns = self._columns()
            columns.add(entries, len(self._echoes[prompt]))
            return self._opening(
                index, self._echoes[prompt] + text, delta.finish_reason, columns, prompt
            )
        return self._event(index, text, delta.finish_reason, self._logprobs(index, entries))

    async def prepare(self, delta: TextDelta) -> None:
        if self._echoes and delta.index not in self._opened:
            await self._read_prompt(delta.index // self._n)

    def _opening(
        self, index: int, text: str, reason: str | None, columns: CompletionColumns, prompt: int
    ) -> bytes:
        """A continuation's first event, with its prompt's log-probabilities."""
        choice = {"index": index, "text": text, "finish_reason": reason}
        content: dict[str, Any] = {**self._head}
        if self._include_usage:
            content["usage"] = None
        written = whole(choice, logprobs=self._written(prompt, columns))
        return b"".join([b"data: ", *whole(content, choices=listed_wholes([written])), b"\n\n"])

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
        columns = [self._columns() for _ in range(count)]
        reasons: list[str | None] = [None] * count
        async with call.watch_client() as watch:
            async with aclosing(self._generation.deltas()) as deltas:
                async for delta in deltas:
                    index = delta.index
                    texts[index].append(delta.text)
                    reasons[index] = delta.finish_reason
                    self._count(index, delta.entries)
                    if self._body.logprobs is not None and not self._only_echo:
                        columns[index].add(delta.entries, self._offset(index // self._best_of))
            watch.stop()
            choices: list[Iterator[bytes]] = []
            for prompt in range(len(self._prompts)):
                await self._read_prompt(prompt)
                for index in self._chosen(prompt):
                    text = "" if self._only_echo else "".join(texts[index])
                    choice = {
                        "index": len(choices),
                        "text": (self._echoes[prompt] if self._echoes else "") + text,
                        "finish_reason": "length" if self._only_echo else reasons[index],
                    }
                    written = self._written(prompt, columns[index])
                    choices.append(whole(choice, logprobs=written))
            answer = {**self._head, "usage": self._usage()}
            await call.reply(200, list(whole(answer, choices=listed_wholes(choices))))

    def _count(self, index: int, entries: Entries) -> None:
        """Keep what choosing the best needs."""
        self._sums[index] += math.fsum(entry.logprob for entry, _ in entries)
        self._counts[index] += len(entries)

    def _chosen(self, prompt: int) -> Sequence[int]:
        """Which continuations of a prompt are returned: all, or the likeliest by mean."""
        candidates = range(prompt * self._best_of, (prompt + 1) * self._best_of)
        if self._best_of == self._n:
            return candidates

        def mean_logprob(index: int) -> float:
            return self._sums[index] / self._counts[index] if self._counts[index] else -math.inf

        return sorted(candidates, key=mean_logprob, reverse=True)[: self._n]

    # ---- both -------------------------------------------------------------------------

    def _usage(self) -> dict[str, object]:
        usage = usage_of(self._generation)
        if self._only_echo:  # the engine had to draw one token that was not asked for
            usage["completion_tokens"] = 0
            usage["total_tokens"] = usage["prompt_tokens"]
        return usage

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
        await columns.add_prompt(list(zip(tokens, padded, strict=False)))
        self._echoed[prompt] = columns

    def _written(self, prompt: int, columns: CompletionColumns) -> Iterator[bytes]:
        """The `logprobs` of a whole continuation, its echoed prompt's first."""
        if self._body.logprobs is None:
            return iter((b"null",))
        return self._echoed.get(prompt, self._columns()).followed_by(columns)

    def _offset(self, prompt: int) -> int:
        return len(self._echoes[prompt]) if self._echoes else 0

    def _logprobs(self, index: int, entries: Entries) -> dict[str, Any] | None:
        """Of an event behind the first."""
        num_top = self._body.logprobs
        if num_top is None:
            return None
        offset = self._offset(index // self._n)
        return completion_logprobs(self._context.text, entries, num_top, offset)
