"""Llama 3: `{"name": ..., "parameters": {...}}` is the whole answer or follows `<|python_tag|>`."""

from __future__ import annotations

from app.text.output.interface import ToolFormat
from app.text.output.json_text import Calls, call_text, json_call
from app.text.output.pieces import AnswerPieces
from app.text.output.source import Broken, Reading, Source


class Llama3Json(ToolFormat):
    """Bare JSON objects, separated by semicolons."""

    recognized_by = ("<|python_tag|>", '{"name": function name, "parameters":')
    special_tokens = ("<|python_tag|>",)
    openings = ("<|python_tag|>",)
    is_bare = True

    @staticmethod
    def written(calls: Calls) -> str:
        return "; ".join(call_text(*call, key="parameters") for call in calls)

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        yield from source.blanks()
        if not opening and (yield from source.accept(*self.openings)):
            yield from source.blanks()
        while True:
            draft = out.draft(source)
            yield from json_call(source, draft)
            draft.close()
            yield from source.blanks()
            yield from source.accept(";")
            yield from source.blanks()
            following = yield from source.peek()
            if not following:
                return
            if following != "{":
                raise Broken  # text follows the last call
