"""Mistral: `[TOOL_CALLS]` and a list of JSON objects, or `[TOOL_CALLS]name[ARGS]{...}` (2025)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from actors.scheduling.request import HeldCalls
from app.text.output.interface import ToolFormat
from app.text.output.json_text import (
    JsonWriting,
    held_call,
    json_arguments,
    json_call,
)
from app.text.output.pieces import AnswerPieces
from app.text.output.source import Reading, Source

_WORD: Final = re.compile(r"[A-Za-z0-9_\-]+")


class Mistral(ToolFormat):
    """Reads both forms; the tokenizer's version decides which one a model writes."""

    recognized_by = ("[TOOL_CALLS]",)
    special_tokens = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    openings = ("[TOOL_CALLS]",)
    writing = JsonWriting("[TOOL_CALLS][")

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        named = [held_call(name, f"{name}[ARGS]", schema) for name, schema in schemas.items()]
        return (
            *super().held(schemas),
            HeldCalls(cls.openings[0], "", tuple(named), None, ""),
        )

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        yield from source.blanks()
        if (yield from source.accept("[")):
            yield from self.read_list(source, out, opening)
            return
        draft = out.draft(source)
        if (yield from source.peek()) == "{":
            yield from json_call(source, draft)
        else:
            draft.begin((yield from source.run(_WORD)))
            if (yield from source.accept("[CALL_ID]")):
                yield from source.run(_WORD)
            yield from source.accept("[ARGS]")
            yield from source.blanks()
            yield from json_arguments(source, draft)
        draft.close()
