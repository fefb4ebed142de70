"""What an answer consists of: text, reasoning and tool calls, in their order."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.text.output.source import Broken, Source

Tools = Mapping[str, Mapping[str, Any]]  # the declared tools' names -> JSON schemas of parameters


@dataclass(frozen=True, slots=True)
class Text:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What is new of one call. name: set when the call begins; arguments: more of the JSON text."""

    index: int
    name: str | None
    arguments: str


AnswerPiece = Text | Reasoning | CallDelta


class AnswerPart(enum.Enum):
    """Which part of an answer is being read."""

    UNDECIDED = enum.auto()
    REASONING = enum.auto()
    ANSWER = enum.auto()


class AnswerPieces:
    """Where readers put what they find; `take` gives it on.

    tools: the declared ones. by_argument: a call goes out argument by argument, as each is whole;
    otherwise once the call is. part: what the text being read belongs to.
    """

    def __init__(self, tools: Tools, *, by_argument: bool) -> None:
        self.tools = tools
        self.by_argument = by_argument
        self.part = AnswerPart.UNDECIDED
        self.num_calls = 0
        self.settled_at: int | None = None  # in the source: the end of the last closed call
        self.open: Draft | None = None  # the call being read
        self.num_read_in_vain = 0  # characters of what proved to be no call
        self._pieces: list[AnswerPiece] = []
        self._after_call = False
        self._has_reasoning = False
        self._held = ""  # line ends of the reasoning, dropped where nothing follows

    def text(self, text: str) -> None:
        if self._after_call:  # line ends between calls are no text
            text = text.lstrip("\n")
        if text:
            self._after_call = False
            self._add(Text, text)

    def reasoning(self, text: str) -> None:
        """Line ends around it belong to its tags."""
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

    def begin_calls(self) -> None:
        """None of the calls that follow is closed yet."""
        self.settled_at = None

    def draft(self, source: Source) -> Draft:
        """A call begins."""
        self.open = Draft(self, source)
        return self.open

    def call(self, delta: CallDelta) -> None:
        self._after_call = True
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, CallDelta) and delta.name is None:
            delta = CallDelta(last.index, last.name, last.arguments + delta.arguments)
            self._pieces.pop()
        self._pieces.append(delta)

    def take(self) -> list[AnswerPiece]:
        """What was found since the last time."""
        taken, self._pieces = self._pieces, []
        return taken

    def _add(self, kind: type[Text] | type[Reasoning], text: str) -> None:
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, kind):
            self._pieces[-1] = kind(last.text + text)
        else:
            self._pieces.append(kind(text))


class Draft:
    """One call while it is read."""

    def __init__(self, pieces: AnswerPieces, source: Source) -> None:
        self._pieces = pieces
        self._source = source
        self._name: str | None = None
        self._members: list[str] = []  # `"key": value`, whole
        self._keys: set[str] = set()
        self._num_sent = 0
        self._index: int | None = None  # once it is announced
        self.reached = source.at  # the end of its last whole argument

    @property
    def name(self) -> str | None:
        return self._name

    def begin(self, name: object) -> None:
        """The name is known; raises Broken for a tool that is not declared."""
        if self._name is not None or not isinstance(name, str) or name not in self._pieces.tools:
            raise Broken
        self._name = name
        self._send()

    @property
    def schema(self) -> Mapping[str, Any]:
        """Of the parameters of the tool that is called."""
        return self._pieces.tools.get(self._name or "", {})

    def argument(self, key: str, value: str) -> None:
        """A whole argument. value: its JSON text. Raises Broken for one that is given twice."""
        if key in self._keys:
            raise Broken
        self._keys.add(key)
        self._members.append(f"{json.dumps(key)}: {value}")
        self.reached = self._source.at
        self._send()

    def close(self) -> None:
        """The call is whole; raises Broken if it has no name."""
        if self._name is None:
            raise Broken
        self._finish()
        self._pieces.settled_at = self._source.at

    def abandon(self) -> bool:
        """What follows is no part of a call. Whether some of it has gone out already: then it ends
        behind its last whole argument, as well-formed as any.
        """
        self._pieces.open = None
        if self._index is None:
            return False
        self._finish()
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
    """All text, all reasoning, and every call's name and arguments."""
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
