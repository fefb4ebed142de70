"""Hunyuan: `<tool_calls>` and a list of JSON objects; `<think>`, then the answer in `<answer>`."""

from __future__ import annotations

from app.text.output.interface import ToolFormat, maybe_end
from app.text.output.json_text import JsonWriting, json_calls
from app.text.output.pieces import AnswerPieces
from app.text.output.source import Reading, Source
from app.text.output.thinking import Think


class HunyuanThink(Think):
    """The marks around the answer, and the line ends next to them, are left out."""

    recognized_by = ("<answer>", "<|extra_4|>", "<｜hy_Assistant｜>")
    special_tokens = (*Think.special_tokens, "<answer>", "</answer>")
    heads = ("<answer>\n", "")

    @classmethod
    def is_of(cls, template: str) -> bool:
        return Think.is_of(template) and super().is_of(template)

    def read(self, source: Source, out: AnswerPieces) -> Reading[None]:
        yield from super().read(source, out)
        start = source.at
        yield from source.blanks()
        if (yield from source.accept("<answer>")):
            source.left_out = ("\n</answer>", "</answer>")
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
