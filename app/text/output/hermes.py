"""Hermes, Qwen3 and many others: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from app.text.output.interface import ToolFormat, ending, maybe_end
from app.text.output.json_text import JsonWriting, json_call
from app.text.output.pieces import AnswerPieces
from app.text.output.source import Reading, Source


class Hermes(ToolFormat):
    """JSON between tags. Some models write a list there."""

    recognized_by = ("<tool_call>",)
    special_tokens = ("<tool_call>", "</tool_call>")
    openings = ("<tool_call>",)
    closing = ("</tool_call>",)
    writing = JsonWriting("<tool_call>\n", "\n</tool_call>", separator=None)

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        yield from source.blanks()
        if (yield from source.accept("[")):
            yield from self.read_list(source, out, opening)
            yield from maybe_end(source, "</tool_call>")
            return
        draft = out.draft(source)
        yield from json_call(source, draft)
        yield from ending(source, "</tool_call>", opening)
        draft.close()
