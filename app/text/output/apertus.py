"""Apertus: a list of objects that each have a tool's name as their only key, between marks.

<|tools_prefix|>[{"add": {"a": 1}}, {"now": {}}]<|tools_suffix|>
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from actors.scheduling.request import HeldCalls
from app.text.output.interface import ToolFormat, maybe_end
from app.text.output.json_text import (
    Calls,
    held_call,
    json_arguments,
    json_object,
)
from app.text.output.pieces import AnswerPieces, Draft
from app.text.output.source import Reading, Source
from app.text.output.thinking import Think

_BEGIN, _END = "<|tools_prefix|>", "<|tools_suffix|>"


class ApertusThink(Think):
    """Deliberation stands before the answer."""

    opening = "<|inner_prefix|>"
    closing = "<|inner_suffix|>"
    recognized_by = ("<|inner_prefix|>",)
    special_tokens = ("<|inner_prefix|>", "<|inner_suffix|>")


class Apertus(ToolFormat):
    """What has to be made is written so, too."""

    recognized_by = (_BEGIN,)
    special_tokens = (_BEGIN, _END)
    openings = (_BEGIN,)
    closing = (_END,)
    forces_held = True

    @staticmethod
    def written(calls: Calls) -> str:
        ones = [json.dumps({name: given}, ensure_ascii=False) for name, given in calls]
        return f"{_BEGIN}[{', '.join(ones)}]{_END}" if ones else ""

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        calls = (
            held_call(name, f"{{{json.dumps(name)}: ", schema, "}")
            for name, schema in schemas.items()
        )
        return (HeldCalls(_BEGIN, "[", tuple(calls), ", ", f"]{_END}"),)

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        yield from source.blanks()
        yield from source.expect("[")
        yield from self.read_list(source, out, opening, _call)
        yield from maybe_end(source, _END)


def _call(source: Source, draft: Draft) -> Reading[None]:
    def called(name: str) -> Reading[None]:
        draft.begin(name)
        yield from json_arguments(source, draft)

    yield from json_object(source, called)
