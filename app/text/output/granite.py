"""Granite 3 and Phi-4-mini: `<|tool_call|>` and JSON. Granite 4 writes as Hermes does."""

from __future__ import annotations

from collections.abc import Mapping

from actors.scheduling.request import HeldCalls
from app.text.output.interface import ToolFormat, ending
from app.text.output.json_text import JsonWriting, json_call
from app.text.output.pieces import AnswerPieces
from app.text.output.source import Reading, Source


class Granite(ToolFormat):
    """The list ends the answer."""

    recognized_by = ("<|tool_call|>",)
    special_tokens = ("<|tool_call|>",)
    openings = ("<|tool_call|>",)
    writing = JsonWriting("<|tool_call|>[")
    forces_held = True

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        yield from source.blanks()
        yield from source.expect("[")
        yield from self.read_list(source, out, opening)


class Granite20b(ToolFormat):
    """The model of 2024 that calls functions has its mark before each of them."""

    recognized_by = ("<function_call>",)
    special_tokens = ("<function_call>",)
    openings = ("<function_call>",)
    writing = JsonWriting("<function_call> ", "", separator=None)

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        yield from source.blanks()
        draft = out.draft(source)
        yield from json_call(source, draft)
        draft.close()


class Phi4Mini(ToolFormat):
    """A list between two marks. Other templates than its own ask for one object there, or for a
    list after `functools`.
    """

    recognized_by = ("<|/tool|>", "<|/tool_call|>", "functools[")
    special_tokens = ("<|tool_call|>", "<|/tool_call|>")
    openings = ("<|tool_call|>", "functools[")
    closing = ("<|/tool_call|>",)
    writing = JsonWriting("<|tool_call|>[", "]<|/tool_call|>")

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        mark = cls.openings[1]
        return (*super().held(schemas), JsonWriting(mark).held(mark, schemas))

    def closing_of(self, opening: str) -> tuple[str, ...]:
        return () if opening == "functools[" else self.closing

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        yield from source.blanks()
        if opening == "functools[" or (yield from source.accept("[")):
            yield from self.read_list(source, out, opening)
            yield from source.blanks()
            yield from source.accept(*self.closing)
            return
        draft = out.draft(source)
        yield from json_call(source, draft)
        yield from ending(source, *self.closing, opening)
        draft.close()
