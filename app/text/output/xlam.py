"""xLAM: the answer is a list of JSON objects with name and arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping

from actors.scheduling.request import HeldCall, HeldCalls, HeldPart
from app.text.output.interface import ToolFormat
from app.text.output.json_text import JsonWriting, maybe, words
from app.text.output.pieces import AnswerPieces
from app.text.output.source import Reading, Source


class XLam(ToolFormat):
    """As other lists of JSON are answers too, one is held that begins as a call does."""

    recognized_by = ('[{"name": "tool_call_name", "arguments":',)
    is_bare = True
    writing = JsonWriting()

    @classmethod
    def is_of(cls, template: str) -> bool:
        return super().is_of(template.replace('\\"', '"'))

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        calls = []
        for name, schema in schemas.items():
            begin = words(f'{{ "name" : {json.dumps(name)} , "arguments" :')
            parts = (begin, maybe(words(" ")), HeldPart("json", schema), words("}"))
            calls.append(HeldCall(name, parts))
        return (HeldCalls("", "[ ", tuple(calls), ",", "]", may_be_text=True),)

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        yield from source.blanks()
        yield from source.expect("[")
        yield from self.read_list(source, out, opening)
