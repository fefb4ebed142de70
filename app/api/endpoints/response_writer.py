"""The response object of /v1/responses, grown as text comes, and its events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from app.api.context import Context, new_id
from app.api.endpoints.logprobs import Entries, EntriesOfText, chat_logprobs
from app.api.endpoints.output import OutputPlan
from app.api.generation import Generation, timing_of
from app.api.http.errors import ApiError
from app.api.sampling_params import own_or_default
from app.api.schema.response_tools import NamespaceTool, shown_name
from app.api.schema.responses import ResponseRequest
from app.api.sse import StreamWriter, named_event
from app.text.incremental import TextDelta
from app.text.output.pieces import AnswerPiece, CallDelta, Reasoning, Text

_CUSTOM: Final = "custom_tool_call"


class ResponseWriter(StreamWriter):
    """`write` takes deltas and returns their events; `response` is the object so far."""

    def __init__(
        self,
        context: Context,
        body: ResponseRequest,
        response_id: str,
        generation: Generation,
        output: OutputPlan,
    ) -> None:
        super().__init__(len(generation.streams))
        self._generation = generation
        self._parser = next(iter(output.parsers(1, stream=bool(body.stream))), None)
        self._body = body
        self._names = {
            shown_name(group.name, tool.name): {"name": tool.name, "namespace": group.name}
            for group in body.tools or []
            if isinstance(group, NamespaceTool)
            for tool in group.tools
        }
        self._base = _base(context, body, response_id)
        self._text = context.text
        self._entries = None if body.num_alternatives is None else EntriesOfText()
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the last item of _output, still growing
        self._call_index = -1  # index of the last call
        self._events: list[bytes] = []
        self._sequence = 0
        self._status = "in_progress"
        self._error: dict[str, Any] | None = None

    def write(self, delta: TextDelta) -> bytes:
        """The events of one delta, opened by `response.created` before the first."""
        self._begin()
        for piece, entries in self._read(delta):
            if isinstance(piece, CallDelta):
                self._add_call(piece)
            elif isinstance(piece, Reasoning):
                self._add_reasoning(piece.text)
            else:
                self._add_text(piece.text, entries)
        if delta.finish_reason is not None:
            rest = () if self._entries is None else self._entries.rest()
            if not self._output or (rest and self._is_in_message):
                self._add_text("", rest)
            self._status = "incomplete" if delta.finish_reason == "length" else "completed"
            self._close_item()
        return self._taken()

    def _read(self, delta: TextDelta) -> Iterator[tuple[AnswerPiece, Entries]]:
        """The pieces, and the log-probabilities of those that are text."""
        parser = self._parser
        if self._entries is not None:
            self._entries.add(delta.entries)
        if parser is None:
            yield from self._with_entries(delta.text, [Text(delta.text)] if delta.text else [])
            return
        for source in (delta.text,) if delta.pieces is None else delta.pieces:
            yield from self._with_entries(source, parser.push((source,)))
        if delta.finish_reason is not None:
            yield from self._with_entries(delta.rest, parser.finish(delta.rest))

    def _with_entries(
        self, source: str, found: Sequence[AnswerPiece]
    ) -> Iterator[tuple[AnswerPiece, Entries]]:
        """source: what they were found in."""
        entries = self._entries
        if entries is None:
            yield from ((piece, ()) for piece in found)
            return
        entries.read(source)
        for piece in found:
            yield piece, entries.of(piece.text) if isinstance(piece, Text) else ()
        if found and not any(isinstance(piece, Text) for piece in found):
            entries.skip()

    def closing(self) -> bytes:
        """The whole response, and its timing where that is asked for."""
        options = self._body.stream_options
        asked = options is not None and options.include_timing
        timing = {"timing": timing_of(self._generation)} if asked else {}
        self._emit(f"response.{self._status}", response=self.response(), **timing)
        return self._taken()

    def _begin(self) -> None:
        if self._sequence == 0:
            self._emit("response.created", response=self.response())
            self._emit("response.in_progress", response=self.response())

    def failing(self, error: ApiError) -> bytes:
        self._begin()
        self._status = "failed"
        if self._open is not None:
            self._open["status"] = "incomplete"
        self._error = {"code": error.code or error.kind, "message": error.message}
        self._emit("response.failed", response=self.response())
        self._emit("error", code=error.code, message=error.message, param=error.param)
        return self._taken()

    def response(self) -> dict[str, Any]:
        """The response object; its usage is exact once the generation is over."""
        generation = self._generation
        usage = None
        if self._status in ("completed", "incomplete"):
            parser = self._parser
            num_reasoning = 0 if parser is None else parser.num_reasoning_tokens
            prompt, answer = generation.num_prompt_tokens, generation.num_completion_tokens
            cached = {"cached_tokens": generation.num_cached_tokens, "cache_write_tokens": 0}
            usage = {
                "input_tokens": prompt,
                "input_tokens_details": cached,
                "output_tokens": answer,
                "output_tokens_details": {"reasoning_tokens": num_reasoning},
                "total_tokens": prompt + answer,
            }
        incomplete = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            **self._base,
            "status": self._status,
            "error": self._error,
            "incomplete_details": incomplete,
            "output": self._output,
            "usage": usage,
        }

    # ---- items ------------------------------------------------------------------------

    def _add_text(self, text: str, entries: Entries) -> None:
        item = self._open
        if item is None or item["type"] != "message":
            self._close_item()
            text = self._begun(text)
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {
                "id": new_id("msg").replace("-", "_"),
                "type": "message",
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
            self._open_item(item)
            self._emit("response.content_part.added", **self._where(item), part=dict(part))
            item["content"].append(part)
        num_top = self._body.num_alternatives or 0
        logprobs = chat_logprobs(self._text, entries, num_top)["content"]
        item["content"][0]["text"] += text
        item["content"][0]["logprobs"] += logprobs
        self._emit("response.output_text.delta", **self._where(item), delta=text, logprobs=logprobs)

    @property
    def _is_in_message(self) -> bool:
        return self._open is not None and self._open["type"] == "message"

    def _add_reasoning(self, text: str) -> None:
        item = self._open
        if item is None or item["type"] != "reasoning":
            self._close_item()
            text = self._begun(text)
            item = {
                "id": new_id("rs").replace("-", "_"),
                "type": "reasoning",
                "status": "in_progress",
                "summary": [],
                "content": [],
            }
            self._open_item(item)
            part = {"type": "reasoning_text", "text": ""}
            self._emit("response.content_part.added", **self._where(item), part=dict(part))
            item["content"].append(part)
        item["content"][0]["text"] += text
        self._emit("response.reasoning_text.delta", **self._where(item), delta=text)

    def _begun(self, text: str) -> str:
        """The text of a new item: a line end keeps it apart only where all of it is joined."""
        return text.removeprefix("\n") if self._output else text

    def _add_call(self, delta: CallDelta) -> None:
        if delta.name is not None:
            self._close_item()
            self._call_index = delta.index
            self._open_item(
                {
                    "id": new_id("ctc" if delta.is_custom else "fc").replace("-", "_"),
                    "type": _CUSTOM if delta.is_custom else "function_call",
                    "status": "in_progress",
                    "call_id": new_id("call").replace("-", "_"),
                    **self._names.get(delta.name, {"name": delta.name}),
                    "input" if delta.is_custom else "arguments": "",
                }
            )
        item = self._open
        if item is None or not delta.arguments:
            return
        item["input" if delta.is_custom else "arguments"] += delta.arguments
        kind = "custom_tool_call_input" if delta.is_custom else "function_call_arguments"
        self._emit(
            f"response.{kind}.delta",
            item_id=item["id"],
            output_index=len(self._output) - 1,
            delta=delta.arguments,
        )

    def _open_item(self, item: dict[str, Any]) -> None:
        self._output.append(item)
        self._open = item
        self._emit("response.output_item.added", output_index=len(self._output) - 1, item=item)

    def _close_item(self) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        cut_short = self._status == "incomplete" or (
            item["type"] in ("function_call", _CUSTOM)
            and self._parser is not None
            and self._call_index in self._parser.cut_calls
        )
        item["status"] = "incomplete" if cut_short else "completed"
        output_index = len(self._output) - 1
        if item["type"] == "message":
            part = item["content"][0]
            where = self._where(item)
            told = {"text": part["text"], "logprobs": part["logprobs"]}
            self._emit("response.output_text.done", **where, **told)
            self._emit("response.content_part.done", **where, part=part)
        elif item["type"] == "reasoning":
            part, where = item["content"][0], self._where(item)
            self._emit("response.reasoning_text.done", **where, text=part["text"])
            self._emit("response.content_part.done", **where, part=part)
        elif item["type"] == _CUSTOM:
            self._emit(
                "response.custom_tool_call_input.done",
                item_id=item["id"],
                output_index=output_index,
                input=item["input"],
            )
        else:
            self._emit(
                "response.function_call_arguments.done",
                item_id=item["id"],
                output_index=output_index,
                name=item["name"],
                arguments=item["arguments"],
            )
        self._emit("response.output_item.done", output_index=output_index, item=item)

    def _where(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self._output) - 1, "content_index": 0}

    # ---- events -----------------------------------------------------------------------

    def _emit(self, kind: str, /, **content: Any) -> None:
        self._sequence += 1
        if self._body.stream:
            event = {"type": kind, "sequence_number": self._sequence - 1, **content}
            self._events.append(named_event(kind, event))

    def _taken(self) -> bytes:
        taken = b"".join(self._events)
        self._events.clear()
        return taken


def _base(context: Context, body: ResponseRequest, response_id: str) -> dict[str, Any]:
    """The request's parameters that the response repeats."""
    text = {"format": {"type": "text"}}
    if body.text is not None and body.text.format is not None:
        text = {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)}
    choice: Any = body.tool_choice or "auto"
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": context.engine.card.name,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "store": False,
        "temperature": own_or_default("temperature", body, context),
        "text": text,
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or []],
        "top_p": own_or_default("top_p", body, context),
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "user": body.user,
        "metadata": body.metadata or {},
    }
