"""What a format of tool calls and one of reasoning are, and how an answer is read with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Final

from app.text.output.pieces import AnswerPieces
from app.text.output.source import Broken, Reading, Source

_MOST_IN_VAIN: Final = 1 << 15  # characters: openings within openings would be read for ever


class Format:
    """How a family of models writes something other than text.

    recognised_by: a chat template that holds one of these texts is of this family. special_tokens:
    must be seen, even where the tokenizer calls them special.
    """

    recognised_by: ClassVar[tuple[str, ...]] = ()
    special_tokens: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def is_of(cls, template: str) -> bool:
        return any(text in template for text in cls.recognised_by)


class ReasoningFormat(Format, ABC):
    """How it writes what it thinks."""

    @abstractmethod
    def read(self, source: Source, out: AnswerPieces) -> Reading[None]:
        """Read the reasoning, and return where the answer begins."""

    @classmethod
    def begins_in(cls, prompt: str) -> bool:
        """Whether a prompt ends within the reasoning: the template has opened it already."""
        return False


class ToolFormat(Format):
    """How it writes tool calls.

    openings: texts that begin calls, wherever they stand. closing: what ends them. is_bare: an
    answer may also begin with calls that nothing announces.
    """

    openings: ClassVar[tuple[str, ...]] = ()
    closing: ClassVar[tuple[str, ...]] = ()
    is_bare: ClassVar[bool] = False

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        """Read the calls behind an opening ("" at a bare beginning); raises Broken."""
        yield from ()
        raise Broken

    def read(self, source: Source, out: AnswerPieces) -> Reading[None]:
        """Read an answer to its end."""
        if self.is_bare and (yield from self._attempt(source, out, "")):
            yield from source.blanks()
        while True:
            openings = self.openings if out.num_read_in_vain < _MOST_IN_VAIN else ()
            opening = yield from source.shown_until(openings, out.text)
            if not opening:
                return
            yield from self._attempt(source, out, opening)

    def _attempt(self, source: Source, out: AnswerPieces, opening: str) -> Reading[bool]:
        """Read calls; what is none becomes text, in which further openings are looked for."""
        start = source.at
        source.at += len(opening)
        out.begin_calls()
        try:
            yield from self.read_calls(source, out, opening)
        except Broken:
            out.num_read_in_vain += source.at - start
            draft = out.open
            if draft is not None and draft.abandon():
                source.at = draft.reached
                yield from _drop_rest(source, self.closing)
                return True
            out.open = None
            if out.settled_at is None:
                out.text(opening)
                source.at = start + len(opening)
                return False
            source.at = out.settled_at
        return True


def ending(source: Source, closing: str, *following: str) -> Reading[None]:
    """Read the mark that ends a call. The end of the text may stand for it, and so may what begins
    the next call; raises Broken for anything else.
    """
    yield from source.blanks()
    if (yield from source.accept(closing)):
        return
    if following and (yield from source.sees(*following)):
        return
    if not source.ended or not closing.startswith(source.text[source.at :]):
        raise Broken
    source.at = len(source.text)


def _drop_rest(source: Source, closing: tuple[str, ...]) -> Reading[None]:
    """Read over what is left of a call that broke; where nothing ends it, it is text."""
    if not closing:
        return
    start = source.at
    try:
        yield from source.until(*closing)
    except Broken:
        source.at = start
