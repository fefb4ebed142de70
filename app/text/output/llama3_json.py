"""Llama 3: `{"name": ..., "parameters": {...}}` is the whole answer or follows `<|python_tag|>`.

Llama 4's own template asks for the same, behind text between `<|python_start|>` and
`<|python_end|>`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import ClassVar, Final

from actors.scheduling.request import HeldCall, HeldCalls, HeldPart
from app.text.output.interface import ToolFormat
from app.text.output.json_text import JsonWriting, json_call, maybe, one_of, words
from app.text.output.pieces import AnswerPieces
from app.text.output.source import Broken, Reading, Source

ASKS_FOR_JSON: Final = '{"name": function name, "parameters":'  # in a chat template


class Llama3Json(ToolFormat):
    """Bare JSON objects, separated by semicolons or nothing."""

    recognized_by = ("<|python_tag|>", ASKS_FOR_JSON)
    hidden: ClassVar[tuple[str, ...]] = ("<|python_start|>", "<|python_end|>")
    openings = ("<|python_tag|>", *hidden)
    special_tokens = openings
    is_bare = True
    writing = JsonWriting("", "", "; ", key="parameters")

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        """As an answer may be JSON that is no call, one is held that begins exactly as they do."""
        calls = []
        for name, schema in schemas.items():
            begin = f'"name" : {json.dumps(name)} , "parameters" :'
            ways = one_of(words(f"{{ {begin}"), words(f'{{ "type" : "function" , {begin}'))
            rest = (maybe(words(" ")), HeldPart("json", schema), words("}"))
            calls.append(HeldCall(name, (ways, *rest)))
        return tuple(
            HeldCalls(opening, "", tuple(calls), cls.writing.separator, "", may_be_text=True)
            for opening in ("", *cls.openings)
        )

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        yield from source.blanks()
        while (yield from source.accept(*self.openings)):
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
