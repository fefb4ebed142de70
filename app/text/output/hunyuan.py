"""Hunyuan: `<tool_calls>` and a list of JSON objects; `<think>`, then the answer in `<answer>`.
MiniMax-M1: the same mark and an object a line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Final

from actors.scheduling.request import HeldCall, HeldCalls
from app.text.output.interface import ToolFormat, maybe_end
from app.text.output.json_text import JsonWriting, json_call, json_calls, maybe, one_of, words
from app.text.output.pieces import AnswerPieces
from app.text.output.source import Reading, Source
from app.text.output.thinking import Think

_BEFORE: Final = maybe(one_of(words(" "), words("\n")))  # an object of a list
_AFTER: Final = maybe(words("\n"))
_SHOWS_OBJECTS: Final = re.compile(r"<tool_calls>(\\n|\s)*{\\?[\"']")  # a chat template


class HunyuanThink(Think):
    """The marks around the answer, and the line ends inside them, are left out."""

    recognized_by: ClassVar[tuple[str, ...]] = ("<|extra_4|>", "<｜hy_Assistant｜>")
    around: ClassVar[tuple[str, str]] = ("<answer>", "</answer>")
    special_tokens = ("<think>", "</think>", *around)
    heads = ("<answer>\n", "")
    tail = "\n</answer>"

    @classmethod
    def is_of(cls, template: str) -> bool:
        return Think.is_of(template) and super().is_of(template)

    def read(self, source: Source, out: AnswerPieces) -> Reading[None]:
        yield from super().read(source, out)
        start = source.at
        yield from source.blanks()
        if (yield from source.accept(self.around[0])):
            source.frame_ends = (f"\n{self.around[1]}", self.around[1])
            yield from source.blanks()
        else:
            source.at = start


class Hunyuan(ToolFormat):
    """Jamba's, too."""

    recognized_by = ("<tool_calls>",)
    special_tokens = ("<tool_calls>", "</tool_calls>")
    openings = ("<tool_calls>",)
    closing = ("</tool_calls>",)
    writing = JsonWriting("<tool_calls>[", "]</tool_calls>")

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        """The marks, and each object of the list, on lines of their own or not."""
        (plain,) = super().held(schemas)
        calls = tuple(HeldCall(call.name, (_BEFORE, *call.parts, _AFTER)) for call in plain.calls)
        listed = replace(plain, head="\n[", calls=calls, separator=",")
        return listed, replace(listed, tail=f"]\n{cls.closing[-1]}")

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        yield from source.blanks()
        yield from source.expect("[")
        yield from json_calls(source, out)
        yield from maybe_end(source, *self.closing)


class MiniMaxM1(Hunyuan):
    """Its template shows an object right behind the mark."""

    writing = JsonWriting("<tool_calls>\n", "\n</tool_calls>", "\n")

    @classmethod
    def is_of(cls, template: str) -> bool:
        return _SHOWS_OBJECTS.search(template) is not None

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        return (cls.writing.held(cls.openings[0], schemas),)

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        yield from source.blanks()
        while True:
            draft = out.draft(source)
            yield from json_call(source, draft)
            draft.close()
            yield from source.blanks()
            if (yield from source.peek()) != "{":
                break
        yield from maybe_end(source, *self.closing)
