"""Tool calls found in a model's text while it streams.

Two forms are read. TAGGED (Hermes, Qwen and many others): `<tool_call>{"name": ..., "arguments":
{...}}</tool_call>` anywhere in ordinary text, which nothing forces to be well made. JSON: the whole
text is one such object or a list of them, as the grammar of a required tool call makes it.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from app.text.call_reader import ARGUMENT_KEYS, CallReader
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

    names: of the declared tools. A tagged call counts once it is whole, closed and valid: JSON that
    names a declared tool and has an object of arguments. What is not is given back as text. Behind
    a grammar every call is valid: arguments are passed on as they come, character for character.
    """

    def __init__(self, form: ToolFormat, names: Collection[str]) -> None:
        self._tagged = form is ToolFormat.TAGGED
        self._names = frozenset(names)
        self._opening = StopStrings([_OPEN])
        self._call: CallReader | None = None if self._tagged else CallReader(in_list=True)
        self._behind = ""  # a whole tagged call: what may still become its closing tag
        self._announced = False
        self._after_call = False
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        """More text in; plain text and parts of calls out."""
        shown: list[str] = []
        deltas: list[CallDelta] = []
        while text:
            if self._call is None:
                text = self._read_plain(text, shown)
            elif self._tagged:
                text = self._read_tagged(self._call, text, shown, deltas)
            else:
                text = self._read_json(self._call, text, shown, deltas)
        return "".join(shown), deltas

    def finish(self) -> tuple[str, list[CallDelta]]:
        """The text has ended; what is no call by now is text after all."""
        if self._call is None:
            return self._opening.finish(), []
        call, self._call = self._call, None
        if not self._tagged:
            return "" if self._announced else call.raw, []
        if call.done and _CLOSE.startswith(self._behind.strip()):
            found = self._valid(call)
            if found is not None:
                return "", [found]
        return _OPEN + call.raw + self._behind, []

    def _read_plain(self, text: str, shown: list[str]) -> str:
        if self._after_call:  # line ends between calls are no text
            text = text.lstrip("\n")
            self._after_call = not text
        shown.append(self._opening.push(text))
        if self._opening.found is None:
            return ""
        rest = self._opening.rest
        self._opening = StopStrings([_OPEN])
        self._call = CallReader(in_list=False)
        return rest

    def _read_tagged(
        self, call: CallReader, text: str, shown: list[str], deltas: list[CallDelta]
    ) -> str:
        if not call.done:
            text = call.push(text)
            if call.broken:  # the character that broke it may begin the next call
                self._call = None
                shown.append(_OPEN + call.raw[:-1])
                return call.raw[-1] + text
            if not call.done:
                return ""
        self._behind += text
        ending = self._behind.lstrip()
        if any(tag.startswith(ending) and tag != ending for tag in (_CLOSE, _OPEN)):
            return ""
        behind, self._behind, self._call = self._behind, "", None
        found = self._valid(call) if ending.startswith((_CLOSE, _OPEN)) else None
        if found is None:
            shown.append(_OPEN + call.raw)
            return behind
        deltas.append(found)
        self._after_call = True
        return ending.removeprefix(_CLOSE)

    def _valid(self, call: CallReader) -> CallDelta | None:
        """The whole call, if it is one of a declared tool."""
        arguments = call.take_arguments() or "{}"
        try:
            body = json.loads(call.raw)
            is_object = isinstance(json.loads(arguments), dict)
        except (ValueError, RecursionError):
            return None
        given = [body[key] for key in ARGUMENT_KEYS if key in body]
        has_object = is_object and all(isinstance(v, dict | str | None) for v in given)
        if call.name is None or call.name not in self._names or not has_object:
            return None
        self.num_calls += 1
        return CallDelta(self.num_calls - 1, call.name, arguments)

    def _read_json(
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
                shown.append(call.raw)
            self._call = None
        elif call.done:
            self._call, self._announced = CallReader(in_list=True), False
        return rest
