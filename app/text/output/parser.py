"""Splits one streamed answer into text, reasoning and calls."""

from __future__ import annotations

from collections.abc import Iterable, Set

from app.text.output.interface import ReasoningFormat, ToolFormat
from app.text.output.json_text import InputText
from app.text.output.pieces import AnswerPart, AnswerPiece, AnswerPieces, CallDelta, Tools
from app.text.output.source import Reading, Source


class OutputParser:
    """num_reasoning_tokens: exact if each pushed text is one token; includes the markers.

    is_transparent: the rest of the answer is plain text. Only the end of the reasoning format's
    reader says so, as Harmony's messages may reason again after text.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None,
        reasoning_format: ReasoningFormat | None,
        tools: Tools,
        *,
        by_argument: bool,
        in_reasoning: bool = False,
        parallel: bool = True,
        custom: Set[str] = frozenset(),
    ) -> None:
        self._source = Source()
        self._out = AnswerPieces(tools, by_argument=by_argument, parallel=parallel)
        if in_reasoning:
            self._out.part = AnswerPart.REASONING
        self._custom = custom
        self._input: InputText | None = None  # of the last call, of a custom tool
        self._input_index = -1
        self._num_undecided = 0  # tokens that may turn out to be reasoning
        self.num_reasoning_tokens = 0
        self.is_transparent = False
        self._reading = self._read(tool_format, reasoning_format)
        next(self._reading)

    @property
    def num_calls(self) -> int:
        return self._out.num_calls

    @property
    def cut_calls(self) -> Set[int]:
        """Indexes of the calls that lack arguments which the model began to write."""
        return self._out.cut_calls

    @property
    def calls_tools(self) -> bool:
        """Whether the answer calls tools, and every call is whole."""
        return self._out.num_calls > 0 and not self._out.cut_calls

    def push(self, texts: Iterable[str]) -> list[AnswerPiece]:
        """Read more text, one token per item if reasoning tokens are counted."""
        for text in texts:
            self._push(text, 1)
        return self._taken()

    def finish(self, rest: str = "") -> list[AnswerPiece]:
        """End of the text; an incomplete call becomes text. rest: its end, no token of its own."""
        self._push(rest, 0)
        self._source.ended = True
        for _ in self._reading:
            raise AssertionError("a reader waits at the end of the text")
        return [*self._taken(), *self._end_input()]

    def _taken(self) -> list[AnswerPiece]:
        """The pieces found; those of a custom tool's call have its text."""
        found = self._out.pop_all()
        if not self._custom:
            return found
        taken: list[AnswerPiece] = []
        for piece in found:
            if not isinstance(piece, CallDelta):
                taken += [*self._end_input(), piece]
                continue
            if piece.name is not None:
                taken += self._end_input()
                self._input = InputText() if piece.name in self._custom else None
                self._input_index = piece.index
            if self._input is None:
                taken.append(piece)
            elif (text := self._input.push(piece.arguments)) or piece.name is not None:
                taken.append(CallDelta(piece.index, piece.name, text, is_custom=True))
        return taken

    def _end_input(self) -> list[AnswerPiece]:
        text = "" if self._input is None else self._input.finish()
        self._input = None
        return [CallDelta(self._input_index, None, text, is_custom=True)] if text else []

    def _push(self, text: str, num_tokens: int) -> None:
        was = self._out.part
        if text:
            self._source.feed(text)
            next(self._reading)
        part = self._out.part
        if AnswerPart.REASONING in (was, part):
            self.num_reasoning_tokens += num_tokens + self._num_undecided
            self._num_undecided = 0
        elif part is AnswerPart.UNDECIDED:
            self._num_undecided += num_tokens
        else:
            self._num_undecided = 0

    def _read(
        self, tool_format: ToolFormat | None, reasoning_format: ReasoningFormat | None
    ) -> Reading[None]:
        source, out = self._source, self._out
        if reasoning_format is not None:
            yield from reasoning_format.read(source, out)
        out.part = AnswerPart.ANSWER
        if tool_format is not None:
            yield from tool_format.read(source, out)
        else:
            # What was read so far is shown before the next wait.
            self.is_transparent = not (source.left_out or source.frame_ends)
            yield from source.shown_until((), out.text)
        while not source.ended:  # a reader that ends early has consumed the rest
            yield
