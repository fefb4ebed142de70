"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from app.api.context import Context, new_id
from app.api.endpoints.conversation import generation_of, prompt_of, template_messages
from app.api.endpoints.large import listed_wholes, whole
from app.api.endpoints.logprobs import (
    ChatColumn,
    TokenTexts,
    chat_logprobs,
    check_alternatives,
)
from app.api.endpoints.output import OutputPlan, plan_output, read_delta, template_variables
from app.api.endpoints.tool_choice import plan_tools
from app.api.generation import Generation, usage_of
from app.api.http.call import Call
from app.api.http.errors import invalid
from app.api.sampling_params import (
    check_continuations,
    checked_grammar,
    requested_grammar,
    sampling_params,
)
from app.api.schema.chat import ChatRequest
from app.api.sse import ChoiceWriter, stream_reply
from app.text.incremental import TextDelta
from app.text.output.parser import OutputParser
from app.text.output.pieces import AnswerPiece, CallDelta, Reasoning, Text, gathered

_BEFORE, _AFTER = '"delta":{"content":', '},"logprobs":null,"finish_reason":null'  # mere text


class Chat:
    """Handler of one request to `/v1/chat/completions`."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def __call__(self, call: Call) -> None:
        body = await call.read_json(ChatRequest)
        context = self._context.of(body.model)
        options = context.options
        n = body.n or 1
        check_continuations(options, n, "n")
        if body.top_logprobs is not None:
            if not body.logprobs:
                raise invalid("top_logprobs needs logprobs: true.", "top_logprobs")
            check_alternatives(options, body.top_logprobs, "top_logprobs")
        tools = plan_tools(body, options)
        grammar, param = tools.constrain(*requested_grammar(body))
        rendered = await prompt_of(
            context,
            template_messages(body.messages, options),
            tools=tools.specs,
            variables=template_variables(context, body.chat_template_kwargs, body.reasoning_effort),
        )
        prompt = rendered.tokens
        context.check_prompt(prompt, "messages")
        output = plan_output(context, tools, grammar, rendered.text)
        grammar = await checked_grammar(output.grammar, context, param, call.key_name)
        sampling = sampling_params(
            body,
            context,
            max_tokens=_max_tokens(body, context, n, len(prompt)),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            grammar=grammar,
        )
        completion_id = new_id("chatcmpl")
        generation = generation_of(context, call, body, completion_id, prompt, sampling, output, n)
        answer = ChatWriter(context, body, completion_id, generation, output)
        if body.stream:
            await stream_reply(call, generation, answer)
        else:
            await answer.reply(call)


def _max_tokens(body: ChatRequest, context: Context, n: int, num_prompt_tokens: int) -> int:
    """Most tokens to generate: the requested number, else all that context and answer allow."""
    given, param = body.max_completion_tokens, "max_completion_tokens"
    if given is None:
        given, param = body.max_tokens, "max_tokens"
    most = context.new_tokens(num_prompt_tokens, given, param)
    if body.logprobs and not body.stream:
        per_position = n * (1 + (body.top_logprobs or 0))
        if given is not None:
            context.check_logprob_entries(per_position * given, "logprobs")
        most = min(most, max(1, context.options.max_logprob_entries // per_position))
    return most


class ChatWriter(ChoiceWriter):
    """Writes the answer of one chat request, whole or as events."""

    def __init__(
        self,
        context: Context,
        body: ChatRequest,
        completion_id: str,
        generation: Generation,
        output: OutputPlan,
    ) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        name = context.engine.card.name
        super().__init__(generation, completion_id, kind, name, body.stream_options)
        count = len(generation.streams)
        self._context = context
        self._body = body
        self._parsers = output.parsers(count, stream=bool(body.stream))
        self._custom = output.custom
        self._opened = [False] * count
        self._is_bare = not self._parsers and not body.logprobs and not self._counts_each

    # ---- events -----------------------------------------------------------------------

    def write(self, delta: TextDelta) -> bytes:
        """The events of one delta, opened by the role in a continuation's first."""
        index = delta.index
        opening = b""
        if not self._opened[index]:
            self._opened[index] = True
            if self._is_bare:
                self.templates[index] = self.template(index, _BEFORE, _AFTER)
            content = None if self._parsers else ""
            opening = self._event(index, {"role": "assistant", "content": content}, None, None)
        if self._is_bare and delta.finish_reason is None:
            return opening + self.write_text(index, delta.text)
        logprobs = None
        if self._body.logprobs:
            logprobs = chat_logprobs(
                self._context.text, delta.entries, self._body.top_logprobs or 0
            )
        if not self._parsers:
            return opening + self._event(
                index, {"content": delta.text}, delta.finish_reason, logprobs
            )
        return opening + self._parsed_event(delta, logprobs)

    def _parsed_event(self, delta: TextDelta, logprobs: Any) -> bytes:
        index = delta.index
        parser = self._parsers[index]
        pieces = read_delta(parser, delta)
        text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
        reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
        calls = [_call_event(piece) for piece in pieces if isinstance(piece, CallDelta)]
        fields: dict[str, Any] = {}
        if reasoning:
            fields["reasoning_content"] = reasoning
        if text or not (calls or reasoning):
            fields["content"] = text
        if calls:
            fields["tool_calls"] = calls
        if parser.is_transparent and not self._body.logprobs and delta.finish_reason is None:
            self.templates[index] = self.template(index, _BEFORE, _AFTER)
        return self._event(index, fields, _reason(delta.finish_reason, parser), logprobs)

    def _event(self, index: int, delta: Any, reason: str | None, logprobs: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self.choice_event(choice)

    def _usage(self) -> dict[str, object]:
        return usage_of(
            self._generation, sum(parser.num_reasoning_tokens for parser in self._parsers)
        )

    # ---- whole ------------------------------------------------------------------------

    async def reply(self, call: Call) -> None:
        """Gather everything and send it."""
        generation = self._generation
        pieces: list[list[AnswerPiece]] = [[] for _ in generation.streams]
        texts = TokenTexts(self._context.text)
        columns = [ChatColumn(texts, self._body.top_logprobs or 0) for _ in generation.streams]
        reasons = [""] * len(pieces)
        async with call.watch_client() as watch:
            async with aclosing(generation.deltas()) as deltas:
                async for delta in deltas:
                    pieces[delta.index] += self._read(delta)
                    columns[delta.index].add(delta.entries)
                    reasons[delta.index] = delta.finish_reason or ""
            watch.stop()
            choices = [
                whole(
                    self._choice(index, pieces[index], reasons[index]),
                    logprobs=columns[index].written() if self._body.logprobs else (b"null",),
                )
                for index in range(len(pieces))
            ]
            answer = {**self._head, "usage": self._usage()}
            await call.reply(200, list(whole(answer, choices=listed_wholes(choices))))

    def _read(self, delta: TextDelta) -> list[AnswerPiece]:
        if self._parsers:
            return read_delta(self._parsers[delta.index], delta)
        return [Text(delta.text)]

    def _choice(self, index: int, pieces: Sequence[AnswerPiece], reason: str) -> dict[str, Any]:
        text, reasoning, calls = gathered(pieces)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text or (None if calls else ""),
            "refusal": None,
            "annotations": [],
        }
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [
                _call(name, arguments, is_custom=name in self._custom) for name, arguments in calls
            ]
        if self._parsers:
            reason = _reason(reason, self._parsers[index]) or ""
        return {"index": index, "message": message, "finish_reason": reason}


def _reason(reason: str | None, parser: OutputParser) -> str | None:
    return "tool_calls" if parser.calls_tools and reason == "stop" else reason


def _call_event(delta: CallDelta) -> dict[str, Any]:
    """A tool call's beginning carries its id and name; later parts only more arguments."""
    if delta.name is not None:
        call = _call(delta.name, delta.arguments, is_custom=delta.is_custom)
        return {"index": delta.index, **call}
    if delta.is_custom:
        return {"index": delta.index, "custom": {"input": delta.arguments}}
    return {"index": delta.index, "function": {"arguments": delta.arguments}}


def _call(name: str, arguments: str, *, is_custom: bool) -> dict[str, Any]:
    call = {"id": new_id("call")}
    if is_custom:
        return {**call, "type": "custom", "custom": {"name": name, "input": arguments}}
    return {**call, "type": "function", "function": {"name": name, "arguments": arguments}}
