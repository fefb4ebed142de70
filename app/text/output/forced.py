"""Calls forced by a grammar: the whole answer is one JSON call or a list of calls."""

from __future__ import annotations

import enum
import json
from typing import Final

from app.text.output.interface import ToolFormat
from app.text.output.pieces import AnswerPart, AnswerPieces, CallDelta
from app.text.output.source import Reading, Source

_BLANK: Final = frozenset(" \t\r\n")
_LIST_MARKS: Final = frozenset("[],")
_ARGUMENT_KEYS: Final = ("arguments", "parameters")


class Forced(ToolFormat):
    """The grammar makes every call valid, so arguments are passed on unchanged as they arrive."""

    def read(self, source: Source, out: AnswerPieces) -> Reading[None]:
        out.part = AnswerPart.ANSWER
        call, announced = CallReader(), False
        while True:
            text = source.text[source.at :]
            source.at = len(source.text)
            source.forget()
            while text:
                text = call.push(text)
                if call.name is not None and not (call.broken and not announced):
                    arguments = call.pop_arguments()
                    if not announced:
                        out.call(CallDelta(out.num_calls, call.name, arguments))
                        out.num_calls += 1
                        announced = True
                    elif arguments:
                        out.call(CallDelta(out.num_calls - 1, None, arguments))
                if call.broken:
                    if announced:
                        out.cut(out.num_calls - 1)
                    out.text(("" if announced else call.raw) + text)
                    yield from source.shown_until((), out.text)
                    return
                if call.done:
                    call, announced = CallReader(), False
            if source.ended:
                if announced:
                    out.cut(out.num_calls - 1)
                out.text("" if announced else call.raw)
                return
            yield


class _State(enum.Enum):
    START = enum.auto()  # before the opening brace
    KEY_OR_END = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE_START = enum.auto()
    VALUE = enum.auto()
    AFTER_VALUE = enum.auto()
    DONE = enum.auto()
    BROKEN = enum.auto()


class CallReader:
    """Reads one call, `{"name": ..., "arguments": {...}}`, from a text that is still growing, and
    returns the arguments' text as it arrives. List punctuation around the object is skipped.

    name: set once read. raw: the text read so far, returned as text if it is not a call.
    """

    __slots__ = (
        "_arguments",
        "_depth",
        "_escaped",
        "_in_string",
        "_key",
        "_state",
        "_value",
        "name",
        "raw",
    )

    def __init__(self) -> None:
        self.name: str | None = None
        self.raw = ""
        self._state = _State.START
        self._key = ""
        self._value: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._arguments: list[str] = []  # read, not yet taken

    @property
    def done(self) -> bool:
        return self._state is _State.DONE

    @property
    def broken(self) -> bool:
        return self._state is _State.BROKEN

    def push(self, text: str) -> str:
        """Read more text; return the rest after the object's closing brace."""
        for position, char in enumerate(text):
            if self._state is _State.START and (char in _BLANK or char in _LIST_MARKS):
                continue
            self.raw += char
            self._read(char)
            if self.done or self.broken:
                return text[position + 1 :]
        return ""

    def pop_arguments(self) -> str:
        """The arguments' text read since the last call of this method.

        Call it only once the name is known.
        """
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def _read(self, char: str) -> None:
        state = self._state
        if state is _State.VALUE:
            self._read_value(char)
        elif state is _State.KEY:
            self._read_key(char)
        elif char in _BLANK:
            pass
        elif state is _State.START and char == "{":
            self._state = _State.KEY_OR_END
        elif state is _State.KEY_OR_END and char == '"':
            self._value = ['"']
            self._state = _State.KEY
        elif state is _State.COLON and char == ":":
            self._state = _State.VALUE_START
        elif state is _State.VALUE_START and char not in "}],:":
            self._value = []
            self._depth = 0
            self._in_string = self._escaped = False
            self._state = _State.VALUE
            self._read_value(char)
        elif state is _State.AFTER_VALUE and char == ",":
            self._state = _State.KEY_OR_END
        elif state in (_State.AFTER_VALUE, _State.KEY_OR_END) and char == "}":
            self._end_object()
        else:
            self._state = _State.BROKEN

    def _read_key(self, char: str) -> None:
        self._value.append(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            key = _loads("".join(self._value))
            self._key = key if isinstance(key, str) else ""
            self._state = _State.COLON

    def _read_value(self, char: str) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
            self._keep(char)
            if not self._in_string and self._depth == 0:
                self._end_value()
        elif char == '"':
            self._in_string = True
            self._keep(char)
        elif char in "{[":
            self._depth += 1
            self._keep(char)
        elif char in "}]" and self._depth:
            self._depth -= 1
            self._keep(char)
            if self._depth == 0:
                self._end_value()
        elif char in ",}]" and self._depth == 0:  # ends a number, true, false or null
            self._end_value()
            self._read(char)
        elif not (char in _BLANK and self._depth == 0):
            self._keep(char)

    def _keep(self, char: str) -> None:
        self._value.append(char)
        if self._key in _ARGUMENT_KEYS and self._value[0] == "{":
            self._arguments.append(char)

    def _end_value(self) -> None:
        self._state = _State.AFTER_VALUE
        if self._key == "name":
            name = _loads("".join(self._value))
            if isinstance(name, str) and name:
                self.name = name
            else:
                self._state = _State.BROKEN
        elif self._key in _ARGUMENT_KEYS and self._value[0] != "{":
            value = _loads("".join(self._value))  # some models write the object as a string
            self._arguments.append(value if isinstance(value, str) else "{}")

    def _end_object(self) -> None:
        self._state = _State.BROKEN if self.name is None else _State.DONE


def _loads(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None
