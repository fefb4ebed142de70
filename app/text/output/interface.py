"""Base classes of tool-call and reasoning formats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from actors.scheduling.request import HeldCalls
from app.text.output.call_lists import CallReader, listed_calls
from app.text.output.json_text import Calls, JsonWriting, json_call
from app.text.output.pieces import MOST_MISREAD, AnswerPieces
from app.text.output.source import Broken, Reading, Source


class Format:
    """How a family of models writes calls or reasoning.

    recognized_by: a chat template that contains one of these texts belongs to the family.
    special_tokens: kept in the text even if the tokenizer marks them as special.
    """

    recognized_by: ClassVar[tuple[str, ...]] = ()
    special_tokens: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def is_of(cls, template: str) -> bool:
        return any(text in template for text in cls.recognized_by)


class ReasoningFormat(Format, ABC):
    """How a family writes reasoning.

    heads: with one of these an answer begins that a grammar makes; "": with none. tail:
    with this it may end if it begins with one.
    """

    heads: ClassVar[tuple[str, ...]] = ("",)
    tail: ClassVar[str] = ""

    @abstractmethod
    def read(self, source: Source, out: AnswerPieces) -> Reading[None]:
        """Read the reasoning; returns at the beginning of the answer."""

    @classmethod
    def begins_in(cls, prompt: str) -> bool:
        """Whether the template opens the reasoning in the prompt."""
        return False

    @classmethod
    def marks(cls, prompt: str) -> tuple[str, ...]:
        """The texts around it; none where the prompt has switched it off."""
        return ()


class ToolFormat(Format):
    """How a family writes tool calls.

    openings: texts that begin calls, anywhere in the answer. closing: texts that end them, the
    outermost last. is_bare: an answer may also begin with calls without an opening. hidden: the
    openings that are not shown where no call follows. writing: of calls in JSON. forces_held: a
    call that has to be made is written as a held one, as no other text is where calls stand.
    """

    openings: ClassVar[tuple[str, ...]] = ()
    hidden: ClassVar[tuple[str, ...]] = ()
    closing: ClassVar[tuple[str, ...]] = ()
    is_bare: ClassVar[bool] = False
    writing: ClassVar[JsonWriting] = JsonWriting()
    forces_held: ClassVar[bool] = False

    @classmethod
    def written(cls, calls: Calls) -> str:
        """Calls as a model of the family writes them."""
        return cls.writing.written(calls)

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        """All ways to write calls of these tools such that they keep to the schemas of their
        arguments (JSON). None where arguments are written in another way.
        """
        return tuple(
            cls.writing.held(opening, schemas)
            for opening in cls.openings
            if cls.writing.begin.startswith(opening)
        )

    @classmethod
    def forced(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        """The same for an answer that is calls. None where one that has to be is the JSON that
        `Forced` reads.
        """
        return cls.held(schemas) if cls.forces_held else ()

    def closing_of(self, opening: str) -> tuple[str, ...]:
        """The texts that end calls after this opening."""
        return self.closing

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        """Read the calls after an opening ("" for a bare beginning); raises Broken."""
        yield from ()
        raise Broken

    def read_list(
        self, source: Source, out: AnswerPieces, opening: str, read: CallReader = json_call
    ) -> Reading[None]:
        """Read the calls of a JSON list behind its bracket. read: of one call."""
        yield from listed_calls(source, out, self.marks(source, opening), read)

    def marks(self, source: Source, opening: str) -> tuple[str, ...]:
        """At these a malformed call ends at the latest."""
        shown = (*self.closing_of(opening), *self.openings)
        return (*shown, *source.left_out, *source.frame_ends)

    def read(self, source: Source, out: AnswerPieces) -> Reading[None]:
        """Read an answer to its end."""
        if self.is_bare and (yield from self._attempt(source, out, "")):
            yield from source.blanks()
        while True:
            openings = self.openings if out.num_misread < MOST_MISREAD else ()
            opening = yield from source.shown_until(openings, out.text)
            if not opening:
                return
            yield from self._attempt(source, out, opening)

    def _attempt(self, source: Source, out: AnswerPieces, opening: str) -> Reading[bool]:
        """Read calls; False if there are none: the opening is then text."""
        start = source.at
        source.at += len(opening)
        is_hidden = opening in self.hidden
        out.begin_calls((source.at if is_hidden else start) if opening else None)
        try:
            yield from self.read_calls(source, out, opening)
        except Broken:
            draft, num_read = out.open, source.at
            if draft is not None and draft.abandon():
                source.at = draft.reached
                out.num_misread += max(0, num_read - source.at)
                yield from _drop_rest(source, self.closing_of(opening), self.openings)
                return True
            out.open = None
            out.num_misread += num_read - (start if out.settled_at is None else out.settled_at)
            if out.settled_at is None:
                out.text("" if is_hidden else opening)
                source.at = start + len(opening)
                return False
            source.at = out.settled_at
        return True


def ending(source: Source, closing: str, *following: str) -> Reading[None]:
    """Read a call's closing mark; the end of the text or one of `following` may replace it.

    Raises Broken for anything else.
    """
    yield from source.blanks()
    if (yield from source.accept(closing)):
        return
    if following and (yield from source.sees(*following)):
        return
    if not source.ended or not closing.startswith(source.text[source.at :]):
        raise Broken
    source.at = len(source.text)


def maybe_end(source: Source, closing: str) -> Reading[None]:
    """Read the mark behind the last of some calls, which may be missing or break off."""
    yield from source.blanks()
    if (yield from source.accept(closing)):
        return
    if source.ended and closing.startswith(source.text[source.at :]):
        source.at = len(source.text)


def dropped(text: str) -> None:
    """Discard the rest of a malformed call."""


def _drop_rest(
    source: Source, closing: tuple[str, ...], openings: tuple[str, ...]
) -> Reading[None]:
    """Discard the rest of a malformed call, up to the next; without a closing mark, it is text."""
    if not closing:
        return
    start = source.at
    try:
        _, mark = yield from source.until(*closing, *openings)
    except Broken:
        source.at = start
        return
    if mark not in closing:
        source.at -= len(mark)
    elif outer := closing[closing.index(mark) + 1 :]:
        yield from source.blanks()
        yield from source.accept(*outer)
