"""Cohere's Command R7B and A: each part of an answer stands between two marks of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from actors.scheduling.request import HeldCall, HeldCalls, HeldPart
from app.text.output.interface import ToolFormat
from app.text.output.json_text import JsonWriting, maybe, one_of, words
from app.text.output.pieces import AnswerPart, AnswerPieces
from app.text.output.source import Reading, Source
from app.text.output.thinking import Think

_RESPONSE: Final = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
_ID: Final = HeldPart("json", '{"type": "string", "pattern": "^[0-9]{1,3}$"}')
_BEGIN: Final = (  # of a call
    maybe(one_of(words(" "), words("\n    "))),
    words("{"),
    maybe(words('"tool_call_id": '), _ID, words(", ")),
)


class CohereThink(Think):
    """Reasoning, and the answer's text without the marks around it, wherever they stand."""

    opening = "<|START_THINKING|>"
    closing = "<|END_THINKING|>"
    recognized_by = ("<|START_THINKING|>",)
    special_tokens = ("<|START_THINKING|>", "<|END_THINKING|>", *_RESPONSE)
    heads = (_RESPONSE[0], "")
    tail = _RESPONSE[1]

    def read(self, source: Source, out: AnswerPieces) -> Reading[None]:
        yield from super().read(source, out)
        source.left_out = _RESPONSE
        start = source.at
        out.part = AnswerPart.ANSWER
        yield from source.blanks()
        if not (yield from source.sees(*_RESPONSE)):
            source.at = start


class Cohere(ToolFormat):
    """A list of JSON objects with the keys `tool_call_id`, `tool_name` and `parameters`."""

    recognized_by = ("<|START_ACTION|>",)
    special_tokens = ("<|START_ACTION|>", "<|END_ACTION|>")
    openings = ("<|START_ACTION|>",)
    closing = ("<|END_ACTION|>",)
    forces_held = True
    writing = JsonWriting(
        "<|START_ACTION|>[", "]<|END_ACTION|>", name_key="tool_name", key="parameters"
    )

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        """With ids or without, on lines of their own or not."""
        (plain,) = super().held(schemas)
        calls = []
        for call in plain.calls:
            begin, *rest = call.parts
            parts = (*_BEGIN, words(begin.text.removeprefix("{")), *rest)
            calls.append(HeldCall(call.name, parts))
        return (replace(plain, calls=tuple(calls), separator=",", tail=f"\n{plain.tail}"),)

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        yield from source.blanks()
        yield from source.expect("[")
        yield from self.read_list(source, out, opening)
        yield from source.blanks()
        yield from source.accept(*self.closing)
