"""Cohere's Command R7B and A: each part of an answer stands between two marks of its own."""

from __future__ import annotations

from typing import Final

from app.text.output.interface import ToolFormat
from app.text.output.json_text import JsonWriting, json_calls
from app.text.output.pieces import AnswerPart, AnswerPieces
from app.text.output.source import Reading, Source
from app.text.output.thinking import Think

_RESPONSE: Final = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")


class CohereThink(Think):
    """Reasoning, and the answer's text without the marks around it, wherever they stand."""

    opening = "<|START_THINKING|>"
    closing = "<|END_THINKING|>"
    recognized_by = ("<|START_THINKING|>",)
    special_tokens = ("<|START_THINKING|>", "<|END_THINKING|>", *_RESPONSE)

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
    writing = JsonWriting(
        "<|START_ACTION|>[", "]<|END_ACTION|>", name_key="tool_name", key="parameters"
    )

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        yield from source.blanks()
        yield from source.expect("[")
        yield from json_calls(source, out)
        yield from source.blanks()
        yield from source.accept(*self.closing)
