"""Tool calls found in a model's text while it streams.

Two forms are read. TAGGED (Hermes, Qwen and many others): `<tool_call>{"name": ..., "arguments":
{...}}</tool_call>` anywhere in ordinary text. JSON: the whole text is one such object or a list
of them, as the grammar of a required tool call makes it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from app.text.call_reader import CallReader
from app.text.stops import StopStrings

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"


class ToolFormat(enum.Enum):
    TAGGED = "tagged"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What is new of one call. name: set when the call begins; arguments: more of the JSON text."""

    index: int
    name: str | None
    arguments: str


class ToolCallParser:
    """Splits a growing text into plain text and tool calls.

    Arguments are passed on as they come, character for character, once the name is known. What
    looks like a call and is none (broken JSON, no name) is given back as text.
    """

    def __init__(self, form: ToolFormat) -> None:
        self._tagged = form is ToolFormat.TAGGED
        self._opening = StopStrings([_OPEN])
        self._closing: str | None = None  # what was read between a call's end and its closing tag
        self._call: CallReader | None = None if self._tagged else CallReader(in_list=True)
        self._announced = False
        self._after_call = False
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        """More text in; plain text and parts of calls out."""
        shown: list[str] = []
        deltas: list[CallDelta] = []
        while text:
            if self._closing is not None:
                text = self._skip_closing(text)
            elif self._call is None:
                text = self._read_plain(text, shown)
            else:
                text = self._read_call(self._call, text, shown, deltas)
        return "".join(shown), deltas

    def finish(self) -> tuple[str, list[CallDelta]]:
        """The text has ended; an unfinished call without a name is text after all."""
        if self._call is None:
            return self._opening.finish(), []
        call, self._call = self._call, None
        if self._announced:
            return "", []
        return (_OPEN if self._tagged else "") + call.raw, []

    def _read_plain(self, text: str, shown: list[str]) -> str:
        if self._after_call:  # line ends between calls are no text
            text = text.lstrip("\n")
            self._after_call = not text
        shown.append(self._opening.push(text))
        if self._opening.found is None:
            return ""
        rest = self._opening.rest
        self._opening = StopStrings([_OPEN])
        self._begin_call()
        return rest

    def _begin_call(self) -> None:
        self._call = CallReader(in_list=not self._tagged)
        self._announced = False

    def _read_call(
        self, call: CallReader, text: str, shown: list[str], deltas: list[CallDelta]
    ) -> str:
        rest = call.push(text)
        if call.name is not None and not (call.broken and not self._announced):
            arguments = call.take_arguments()
            if not self._announced:
                self._announced = True
                deltas.append(CallDelta(self.num_calls, call.name, arguments))
                self.num_calls += 1
            elif arguments:
                deltas.append(CallDelta(self.num_calls - 1, None, arguments))
        if call.broken:
            if not self._announced:
                shown.append((_OPEN if self._tagged else "") + call.raw)
            self._call = None
        elif call.done:
            if self._tagged:
                self._call, self._closing = None, ""
            else:
                self._begin_call()
        return rest

    def _skip_closing(self, text: str) -> str:
        """Leave out blanks and one closing tag after a call; return what follows."""
        seen = (self._closing or "") + text
        stripped = seen.lstrip()
        if not stripped or (len(stripped) < len(_CLOSE) and _CLOSE.startswith(stripped)):
            self._closing = seen
            return ""
        self._closing = None
        self._after_call = True
        return stripped.removeprefix(_CLOSE)
