"""The message of /v1/messages, grown block by block, and its events."""

from __future__ import annotations

import json
import sys
from typing import Any, ClassVar

from app.api.context import Context, new_id
from app.api.endpoints.output import OutputPlan, read_delta
from app.api.generation import Generation
from app.api.http.anthropic import error_object
from app.api.http.errors import ApiError
from app.api.sse import StreamWriter, named_event
from app.text.incremental import TextDelta
from app.text.output.pieces import AnswerPiece, CallDelta, Reasoning, Text


class MessageWriter(StreamWriter):
    """`write` takes deltas and returns their events; `message` is the object so far."""

    ending: ClassVar[bytes] = b""
    keep_alive: ClassVar[bytes] = named_event("ping", {"type": "ping"})

    def __init__(
        self,
        context: Context,
        message_id: str,
        generation: Generation,
        output: OutputPlan,
        *,
        stream: bool,
        shows_thinking: bool,
        fills_context: bool,
    ) -> None:
        """fills_context: the context ends before `max_tokens`."""
        super().__init__(1)
        self._reason_of_length = "model_context_window_exceeded" if fills_context else "max_tokens"
        self._shows_thinking = shows_thinking
        self._generation = generation
        self._parser = next(iter(output.parsers(1, stream=stream)), None)
        self._stream = stream
        self._base = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": context.engine.card.name,
        }
        self._blocks: list[dict[str, Any]] = []
        self._input = ""  # of the tool use being written, as JSON text
        self._is_open = False  # the last block is still growing
        self._events: list[bytes] = []
        self._started = False
        self._stop: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}

    def write(self, delta: TextDelta) -> bytes:
        """The events of one delta, opened by `message_start` before the first."""
        if not self._started:
            self._started = True
            self._emit("message_start", message=self.message())
        pieces: list[AnswerPiece] = [Text(delta.text)] if delta.text else []
        if self._parser is not None:
            pieces = read_delta(self._parser, delta)
        for piece in pieces:
            if isinstance(piece, CallDelta):
                self._add_call(piece)
            elif self._shows_thinking or not isinstance(piece, Reasoning):
                self._add_text(piece)
        if delta.finish_reason is not None:
            self._close_block()
            reason = self._reason(delta.finish_reason)
            self._stop = {"stop_reason": reason, "stop_sequence": self._stop_sequence()}
        return self._taken()

    def closing(self) -> bytes:
        """Why it stopped, and the usage."""
        self._emit("message_delta", delta=self._stop, usage=self._usage())
        self._emit("message_stop")
        return self._taken()

    def failing(self, error: ApiError) -> bytes:
        content = error_object(error)
        self._emit("error", error=content["error"])
        return self._taken()

    def message(self) -> dict[str, Any]:
        """The message object; its usage is exact once the generation is over."""
        return {
            **self._base,
            "content": self._blocks,
            **self._stop,
            "usage": self._usage(),
        }

    # ---- blocks -----------------------------------------------------------------------

    def _add_text(self, piece: Text | Reasoning) -> None:
        kind, text = "thinking" if isinstance(piece, Reasoning) else "text", piece.text
        if not self._is_open or self._blocks[-1]["type"] != kind:
            if self._blocks:  # a line end keeps it apart only where all of it is joined
                text = text.removeprefix("\n")
            empty = {"signature": ""} if kind == "thinking" else {}
            self._open_block({"type": kind, kind: "", **empty})
        self._blocks[-1][kind] += text
        self._delta({"type": f"{kind}_delta", kind: text})

    def _add_call(self, piece: CallDelta) -> None:
        if piece.name is not None:
            self._open_block(
                {
                    "type": "tool_use",
                    "id": new_id("toolu").replace("-", "_"),
                    "name": piece.name,
                    "input": {},
                }
            )
        self._input += piece.arguments
        if piece.arguments:
            self._delta({"type": "input_json_delta", "partial_json": piece.arguments})

    def _open_block(self, block: dict[str, Any]) -> None:
        self._close_block()
        self._blocks.append(block)
        self._is_open = True
        self._emit(
            "content_block_start", index=len(self._blocks) - 1, content_block=self._blocks[-1]
        )

    def _delta(self, delta: dict[str, Any]) -> None:
        self._emit("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close_block(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        block = self._blocks[-1]
        if block["type"] == "tool_use":
            block["input"], self._input = _object(self._input), ""
        elif block["type"] == "thinking":
            self._delta({"type": "signature_delta", "signature": ""})
        self._emit("content_block_stop", index=len(self._blocks) - 1)

    def _reason(self, reason: str) -> str:
        if reason == "length":
            return self._reason_of_length
        if self._stop_sequence() is not None:
            return "stop_sequence"
        calls = self._parser is not None and self._parser.calls_tools
        return "tool_use" if calls else "end_turn"

    def _stop_sequence(self) -> str | None:
        return self._generation.streams[0].stop_string

    def _usage(self) -> dict[str, int]:
        generation = self._generation
        cached = generation.num_cached_tokens
        return {
            "input_tokens": generation.num_prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": generation.num_completion_tokens,
        }

    # ---- events -----------------------------------------------------------------------

    def _emit(self, kind: str, /, **content: Any) -> None:
        if self._stream:
            self._events.append(named_event(kind, {"type": kind, **content}))

    def _taken(self) -> bytes:
        taken = b"".join(self._events)
        self._events.clear()
        return taken


def _object(text: str) -> dict[str, Any]:
    """A call's arguments, as far as an answer can hold them: half of a surrogate pair is no text,
    and a number too large for a float is the largest. Nothing of what `max_tokens` cut off within a
    forced call."""
    try:
        found = json.loads(text or "{}", parse_float=_finite, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    if "\\u" not in text:
        return found
    whole = json.dumps(found, ensure_ascii=False).encode("utf-16", "surrogatepass")
    cleaned: dict[str, Any] = json.loads(whole.decode("utf-16", "replace"))
    return cleaned


def _finite(number: str) -> float:
    return max(-sys.float_info.max, min(float(number), sys.float_info.max))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
