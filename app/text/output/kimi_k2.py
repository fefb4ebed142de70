"""Kimi K2: an id that holds the name, and an object, between marks.

<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}
<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

from actors.scheduling.request import HeldCall, HeldCalls, HeldPart
from app.text.output.interface import ToolFormat, ending, maybe_end
from app.text.output.json_text import Calls, json_arguments, words
from app.text.output.pieces import AnswerPieces
from app.text.output.source import Reading, Source

_ALL, _ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_ONE, _ONE_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_ARGUMENTS: Final = "<|tool_call_argument_begin|>"
_ID: Final = re.compile(r"[^<>{}\s]+")
_NAME: Final = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")
_NUMBER: Final = HeldPart("until", _ARGUMENTS, (HeldPart("match", "[0-9]{1,4}"),))


class KimiK2(ToolFormat):
    """The marks around all calls may be missing."""

    recognized_by = (_ALL, "tool_declare<|im_middle|>")
    special_tokens = (_ALL, _ALL_END, _ONE, _ONE_END, _ARGUMENTS)
    openings = (_ALL, _ONE)
    closing = (_ONE_END, _ALL_END)

    @staticmethod
    def written(calls: Calls) -> str:
        texts = [
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            for _, arguments in calls
        ]
        ones = [
            f"{_ONE}functions.{name}:{number}{_ARGUMENTS}{text}{_ONE_END}"
            for number, ((name, _), text) in enumerate(zip(calls, texts, strict=True))
        ]
        return f"{_ALL}{''.join(ones)}{_ALL_END}" if ones else ""

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        whole, bare = (
            tuple(
                HeldCall(
                    name,
                    (
                        words(f"{before}functions.{name}:"),
                        _NUMBER,
                        HeldPart("json", schema),
                        words(_ONE_END),
                    ),
                )
                for name, schema in schemas.items()
            )
            for before in (_ONE, "")
        )
        return (HeldCalls(_ALL, "", whole, "", _ALL_END), HeldCalls(_ONE, "", bare, None, ""))

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        if opening == _ALL:
            yield from source.blanks()
            yield from source.expect(_ONE)
        while True:
            draft = out.draft(source)
            yield from source.blanks()
            given = yield from source.run(_ID)
            name = _NAME.fullmatch(given)
            draft.begin(given if name is None or given in out.tools else name[1])
            yield from source.blanks()
            yield from source.expect(_ARGUMENTS)
            yield from source.blanks()
            yield from json_arguments(source, draft)
            yield from ending(source, _ONE_END, _ONE, _ALL_END)
            draft.close()
            yield from source.blanks()
            if not (yield from source.accept(_ONE)):
                break
        yield from maybe_end(source, _ALL_END)
