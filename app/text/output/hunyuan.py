"""Hunyuan: `<think>`, then the answer in `<answer>`; calls between `<tool_calls>` and its end.

<tool_calls><tool_call>add
```json
{"a": 1}
```</tool_call>
<tool_call>now
```json
{}
```</tool_call></tool_calls>

Other templates than its own ask for a list of JSON objects there; MiniMax-M1's, an object a line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Final

from actors.scheduling.request import HeldCall, HeldCalls, HeldPart
from app.text.output.call_lists import one_of_several
from app.text.output.interface import ToolFormat, ending, maybe_end
from app.text.output.json_text import (
    JsonWriting,
    json_arguments,
    json_call,
    maybe,
    one_of,
    words,
)
from app.text.output.pieces import AnswerPieces
from app.text.output.source import Broken, Reading, Source
from app.text.output.tags import lines
from app.text.output.thinking import Think

_ONE, _ONE_END, _BLOCK = "<tool_call>", "</tool_call>", "```"
_NAME: Final = re.compile(r"[^<>{}`\s]+")
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
    """Reads both forms. The list is Jamba's, too. A call by name may stand without the marks around
    all, as the next one behind a malformed one does.
    """

    recognized_by = ("<tool_calls>",)
    special_tokens: ClassVar[tuple[str, ...]] = ("<tool_calls>", "</tool_calls>", _ONE, _ONE_END)
    openings: ClassVar[tuple[str, ...]] = ("<tool_calls>", _ONE)
    closing: ClassVar[tuple[str, ...]] = (_ONE_END, "</tool_calls>")
    writing = JsonWriting("<tool_calls>[", "]</tool_calls>")

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        """Marks, and each object of the list, on lines of their own or not."""
        (plain,) = super().held(schemas)
        calls = tuple(HeldCall(call.name, (_BEFORE, *call.parts, _AFTER)) for call in plain.calls)
        listed = replace(plain, head="\n[", calls=calls, separator=",")
        bare = tuple(_named(name, schema) for name, schema in schemas.items())
        named = tuple(HeldCall(call.name, (words(_ONE), *call.parts)) for call in bare)
        return (
            listed,
            replace(listed, tail=f"]\n{cls.closing[-1]}"),
            HeldCalls(plain.opening, "\n", named, "", cls.closing[-1]),
            HeldCalls(_ONE, "", bare, None, ""),
        )

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        yield from source.blanks()
        if opening != _ONE and (yield from source.expect("[", _ONE)) == "[":
            yield from self.read_list(source, out, opening)
        else:
            yield from _named_calls(source, out)
        yield from maybe_end(source, self.closing[-1])


def _named(name: str, schema: str) -> HeldCall:
    parts = (HeldPart("json", schema), *lines(f"\n{_BLOCK}"), *lines(f"\n{_ONE_END}\n"))
    return HeldCall(name, (*lines(f"{name}\n{_BLOCK}json\n"), *parts))


def _named_calls(source: Source, out: AnswerPieces) -> Reading[None]:
    """Calls by name, after the mark of the first."""
    following = True
    while following:
        draft = out.draft(source)
        yield from source.blanks()
        draft.begin((yield from source.run(_NAME)))
        yield from source.blanks()
        if has_block := bool((yield from source.accept(_BLOCK))):
            yield from source.accept("json")
        yield from source.blanks()
        yield from json_arguments(source, draft)
        if has_block:
            yield from ending(source, _BLOCK, _ONE_END)
        yield from ending(source, _ONE_END, _ONE, Hunyuan.closing[-1])
        draft.close()
        yield from source.blanks()
        following = bool((yield from source.accept(_ONE)))


class MiniMaxM1(Hunyuan):
    """Its template shows an object right behind the mark. A malformed line is text, and the next
    line that begins an object is read as a call.
    """

    special_tokens = ("<tool_calls>", "</tool_calls>")
    openings = special_tokens[:1]
    closing = special_tokens[1:]
    writing = JsonWriting("<tool_calls>\n", "\n</tool_calls>", "\n")

    @classmethod
    def is_of(cls, template: str) -> bool:
        return _SHOWS_OBJECTS.search(template) is not None

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        return (cls.writing.held(cls.openings[0], schemas),)

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        def skip(start: int) -> Reading[bool]:
            source.at = start
            return bool((yield from source.go_to("\n", *self.closing)))

        is_call = False
        yield from source.blanks()
        while (yield from source.peek()) == "{":
            is_call = yield from one_of_several(source, out, json_call, source.blanks, skip)
            yield from source.blanks()
        if not is_call:
            raise Broken
        yield from maybe_end(source, self.closing[-1])
