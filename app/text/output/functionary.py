"""Functionary 3.1, and Llama 3.1 where tools are custom ones: `<function=add>{"a": 1}</function>`.

Qwen3-Coder has parameters in tags there, not JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

from actors.scheduling.request import HeldCalls
from app.text.output.interface import ToolFormat, ending
from app.text.output.json_text import Calls, held_call, json_arguments
from app.text.output.pieces import AnswerPieces
from app.text.output.source import Reading, Source

_CALL, _CALL_END = "<function=", "</function>"
_OF_QWEN3_CODER: Final = ("<parameter=", "<tool_call>")
_NAME: Final = re.compile(r"[^<>{}\s]+")


class Functionary(ToolFormat):
    """Its interpreter's code, behind `<|python_tag|>`, is text."""

    recognized_by = (_CALL,)
    openings = (_CALL,)
    closing = (_CALL_END,)

    @classmethod
    def is_of(cls, template: str) -> bool:
        return super().is_of(template) and not any(mark in template for mark in _OF_QWEN3_CODER)

    @staticmethod
    def written(calls: Calls) -> str:
        texts = (
            (name, given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))
            for name, given in calls
        )
        return "\n".join(f"{_CALL}{name}>{text}{_CALL_END}" for name, text in texts)

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        calls = (held_call(name, f"{name}>", schema, _CALL_END) for name, schema in schemas.items())
        return (HeldCalls(_CALL, "", tuple(calls), None, ""),)

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        draft = out.draft(source)
        draft.begin((yield from source.run(_NAME)))
        yield from source.expect(">")
        yield from source.blanks()
        yield from json_arguments(source, draft)
        yield from ending(source, _CALL_END, _CALL)
        draft.close()
