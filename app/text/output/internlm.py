"""InternLM 2 and 3: `<|action_start|><|plugin|>`, an object with `parameters`, and an end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from actors.scheduling.request import HeldCalls
from app.text.output.interface import ToolFormat, ending
from app.text.output.json_text import JsonWriting, json_call
from app.text.output.pieces import AnswerPieces
from app.text.output.source import Reading, Source

_ACTION, _PLUGIN, _ACTION_END = "<|action_start|>", "<|plugin|>", "<|action_end|>"
_CALLS: Final = f"{_ACTION}{_PLUGIN}"


class InternLM(ToolFormat):
    """The code of its interpreter, which has another mark in place of the second, is text."""

    recognized_by = (_ACTION, _PLUGIN)
    special_tokens = (_ACTION, _PLUGIN, _ACTION_END)
    openings = (_ACTION,)
    closing = (_ACTION_END,)
    writing = JsonWriting(f"{_CALLS}\n", _ACTION_END, separator=None, key="parameters")

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        (plain,) = super().held(schemas)
        return (replace(plain, head=_PLUGIN), plain)

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        yield from source.expect(_PLUGIN)
        yield from source.blanks()
        draft = out.draft(source)
        yield from json_call(source, draft)
        yield from ending(source, _ACTION_END, _ACTION)
        draft.close()
