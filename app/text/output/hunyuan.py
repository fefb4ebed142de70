"""Hunyuan: `<tool_calls>` and a list of JSON objects; `<think>`, then the answer in `<answer>`."""

from __future__ import annotations

from typing import ClassVar

from app.text.output.interface import ToolFormat, maybe_end
from app.text.output.json_text import JsonWriting, json_calls
from app.text.output.pieces import AnswerPieces
from app.text.output.source import Reading, Source
from app.text.output.thinking import Think


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

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        yield from source.blanks()
        yield from source.expect("[")
        yield from json_calls(source, out)
        yield from maybe_end(source, *self.closing)
