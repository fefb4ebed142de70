"""Granite 3: `<|tool_call|>` and a list of JSON objects. Granite 4 writes as Hermes does."""

from __future__ import annotations

from app.text.output.interface import ToolFormat
from app.text.output.json_text import Calls, call_text, json_calls
from app.text.output.pieces import AnswerPieces
from app.text.output.source import Reading, Source


class Granite(ToolFormat):
    """The list ends the answer."""

    recognized_by = ("<|tool_call|>",)
    special_tokens = ("<|tool_call|>",)
    openings = ("<|tool_call|>",)

    @staticmethod
    def written(calls: Calls) -> str:
        return f"<|tool_call|>[{', '.join(call_text(*call) for call in calls)}]"

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        yield from source.blanks()
        yield from source.expect("[")
        yield from json_calls(source, out)
