"""The pieces of an answer: text, reasoning and tool calls, in order."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from app.text.output.schema_types import properties_of
from app.text.output.source import Broken, Source

MOST_MISREAD: Final = 1 << 15  # characters; bounds the time spent on what is read again
Tools = Mapping[str, Mapping[str, Any]]  # the declared tools' names -> JSON schemas of parameters


@dataclass(frozen=True, slots=True)
class Text:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the reasoning that precedes the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """An increment of one call. name: set in the first; arguments: more of the JSON text, or of the
    text itself where the tool is custom.
    """

    index: int
    name: str | None
    arguments: str
    is_custom: bool = False


AnswerPiece = Text | Reasoning | CallDelta
_Kind = type[Text] | type[Reasoning]


class AnswerPart(enum.Enum):
    """The part of an answer that is being read."""

    UNDECIDED = enum.auto()
    REASONING = enum.auto()
    ANSWER = enum.auto()


class AnswerPieces:
    """Collects the pieces that readers find; `take` returns them.

    tools: the declared tools. by_argument: send each argument of a call once it is complete;
    otherwise the whole call at once. parallel: keep the calls after the first, too. part: the part
    of the answer being read.
    """

    def __init__(self, tools: Tools, *, by_argument: bool, parallel: bool = True) -> None:
        self.tools = tools
        self.by_argument = by_argument
        self._parallel = parallel
        self.part = AnswerPart.UNDECIDED
        self.num_calls = 0
        self.settled_at: int | None = None  # end of the last closed call, or text, in the source
        self._begun_at: int | None = None  # of a group of calls, where its text begins
        self.open: Draft | None = None  # the call being read
        self.num_misread = 0  # characters read as calls that were not
        self.num_overread = 0  # characters read beyond the ends of values in vain
        self.cut_calls: set[int] = set()  # indexes of those sent without their end
        self._pieces: list[AnswerPiece] = []
        self._after_call = False
        self._has_reasoning = False
        self._shown: set[_Kind] = set()  # kinds of which there is some
        self._apart: set[_Kind] = set()  # kinds whose next piece begins on a line of its own
        self._held = ""  # line ends of the reasoning, dropped at its end

    def text(self, text: str) -> None:
        if self._after_call:  # line ends between calls are not text
            text = text.lstrip("\n")
        if text:
            self._after_call = False
            self._add(Text, text)

    def reasoning(self, text: str) -> None:
        """Add reasoning without the line ends next to its tags."""
        text = self._held + text
        if not self._has_reasoning:
            text = text.lstrip("\n")
        shown = text.rstrip("\n")
        self._held = text[len(shown) :]
        if shown:
            self._has_reasoning = True
            self._add(Reasoning, shown)

    def end_reasoning(self) -> None:
        self._held, self._has_reasoning = "", False
        self.part = AnswerPart.ANSWER

    def begin_message(self) -> None:
        """Keep what follows apart from the text and the reasoning before, by a line end."""
        self._apart = self._shown.copy()

    def begin_calls(self, at: int | None) -> None:
        """Start a group of calls, none of them closed yet. at: where its text begins in the source;
        None: nothing before its calls tells them from text."""
        self.settled_at, self._begun_at = None, at

    @property
    def unshown_at(self) -> int | None:
        """Where the text of a malformed call begins, with what stands before it; None if no call
        behind it is one."""
        return self._begun_at if self.settled_at is None else self.settled_at

    def draft(self, source: Source) -> Draft:
        """Begin a call."""
        self.open = Draft(self, source)
        return self.open

    def call(self, delta: CallDelta) -> None:
        self._after_call = True
        if delta.index and not self._parallel:
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, CallDelta) and delta.name is None:
            delta = CallDelta(last.index, last.name, last.arguments + delta.arguments)
            self._pieces.pop()
        self._pieces.append(delta)

    def cut(self, index: int) -> None:
        """Mark a call that was sent in part and has no more to come."""
        if not index or self._parallel:
            self.cut_calls.add(index)

    def pop_all(self) -> list[AnswerPiece]:
        """The pieces found since the last call of this method."""
        taken, self._pieces = self._pieces, []
        return taken

    def _add(self, kind: _Kind, text: str) -> None:
        if kind in self._apart:
            self._apart.discard(kind)
            text = f"\n{text}"
        self._shown.add(kind)
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, kind):
            self._pieces[-1] = kind(last.text + text)
        else:
            self._pieces.append(kind(text))


class Draft:
    """A call being read."""

    def __init__(self, pieces: AnswerPieces, source: Source) -> None:
        self._pieces = pieces
        self._source = source
        self._name: str | None = None
        self._members: list[str] = []  # complete `"key": value` texts
        self._keys: set[str] = set()
        self._num_sent = 0
        self._index: int | None = None  # set once the call is announced
        self.reached = source.at  # the end of its last complete argument
        self.is_whole = False  # all its arguments are read; what may follow adds none

    @property
    def name(self) -> str | None:
        return self._name

    def begin(self, name: object) -> None:
        """Set the name; raises Broken if the tool is not declared."""
        if self._name is not None or not isinstance(name, str) or name not in self._pieces.tools:
            raise Broken
        self._name = name
        self._send()

    @property
    def is_sent(self) -> bool:
        """Whether part of it is."""
        return self._index is not None

    @property
    def num_overread(self) -> int:
        """Characters of the answer that were read beyond the ends of values in vain."""
        return self._pieces.num_overread

    def overread(self, num_chars: int) -> None:
        """Count such characters, which are read again."""
        self._pieces.num_overread += num_chars

    @property
    def schema(self) -> Mapping[str, Any]:
        """Schema of the called tool's parameters."""
        return self._pieces.tools.get(self._name or "", {})

    def argument(self, key: str, value: str) -> None:
        """Add a complete argument. value: its JSON text. One that the tool does not declare counts
        once, as no grammar keeps a model from repeating it; raises Broken if another is repeated.
        """
        if key not in self._keys:
            self._keys.add(key)
            self._members.append(f"{json.dumps(key)}: {value}")
        elif key in properties_of(self.schema):
            raise Broken
        self.reached = self._source.at
        self._send()

    def close(self) -> None:
        """End the call; raises Broken if it has no name."""
        if self._name is None:
            raise Broken
        self._finish()
        self._pieces.settled_at = self._source.at

    def abandon(self) -> bool:
        """Give up a malformed call; returns whether part of it was already sent.

        A call sent in part is closed after its last complete argument, so its JSON is valid.
        """
        self._pieces.open = None
        if self._index is None:
            return False
        self._finish()
        if not self.is_whole:
            self._pieces.cut(self._index)
        return True

    def _finish(self) -> None:
        self._announce()
        self._emit(None, self._unsent() + ("}" if self._num_sent else "{}"))
        self._pieces.open = None

    def _send(self) -> None:
        if self._pieces.by_argument and self._name is not None and self._members:
            self._announce()
            self._emit(None, self._unsent())

    def _announce(self) -> None:
        if self._index is None:
            self._index = self._pieces.num_calls
            self._pieces.num_calls += 1
            arguments = self._unsent()
            self._emit(self._name, arguments)

    def _unsent(self) -> str:
        new = self._members[self._num_sent :]
        start = "" if not new else ", " if self._num_sent else "{"
        self._num_sent = len(self._members)
        return start + ", ".join(new)

    def _emit(self, name: str | None, arguments: str) -> None:
        if self._index is not None and (name is not None or arguments):
            self._pieces.call(CallDelta(self._index, name, arguments))


def gathered(pieces: Sequence[AnswerPiece]) -> tuple[str, str, list[tuple[str, str]]]:
    """The joined text and reasoning, and each call's name and arguments."""
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, CallDelta):
            if piece.name is not None:
                calls.append((piece.name, ""))
            name, arguments = calls[piece.index]
            calls[piece.index] = (name, arguments + piece.arguments)
    text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    return text, reasoning, calls
