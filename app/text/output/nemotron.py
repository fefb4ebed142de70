"""Nemotron: `<TOOLCALL>[{"name": "add", "arguments": {"a": 1}}]</TOOLCALL>`."""

from __future__ import annotations

from app.text.output.interface import ToolFormat, maybe_end
from app.text.output.json_text import JsonWriting
from app.text.output.pieces import AnswerPieces
from app.text.output.source import Reading, Source


class Nemotron(ToolFormat):
    """A JSON list between tags. Nemotron 3 writes as Qwen3-Coder does."""

    recognized_by = ("<TOOLCALL>",)
    special_tokens = ("<TOOLCALL>", "</TOOLCALL>")
    openings = ("<TOOLCALL>",)
    closing = ("</TOOLCALL>",)
    writing = JsonWriting("<TOOLCALL>[", "]</TOOLCALL>")

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        yield from source.blanks()
        yield from source.expect("[")
        yield from self.read_list(source, out, opening)
        yield from maybe_end(source, *self.closing)
