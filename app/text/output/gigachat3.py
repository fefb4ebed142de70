"""GigaChat 3: a turn of its own with a JSON object; 3.1: an object behind a mark.

I add.<|message_sep|>

function call<|role_sep|>
{"name": "add", "arguments": {"a": 1}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from actors.scheduling.request import HeldCalls
from app.text.output.interface import ToolFormat
from app.text.output.json_text import JsonWriting, json_call
from app.text.output.pieces import AnswerPieces
from app.text.output.source import Reading, Source

_TURN_END, _ROLE_END, _CALL = "<|message_sep|>", "<|role_sep|>", "<|function_call|>"
_ROLE: Final = f"function call{_ROLE_END}"


class GigaChat3(ToolFormat):
    """Reads both. The marks of turns are not shown."""

    recognized_by = (_ROLE_END,)
    special_tokens = (_TURN_END, _ROLE_END, _CALL)
    openings = (f"{_TURN_END}\n\n{_ROLE}", f"\n\n{_ROLE}", _ROLE, _ROLE_END, _CALL)
    writing = JsonWriting(f"{_TURN_END}\n\n{_ROLE}\n", "", separator=None)

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        """Within a text the last mark alone tells that a call follows."""
        after_role = (
            JsonWriting(f"{mark}\n", "", separator=None).held(mark, schemas)
            for mark in (_ROLE_END, cls.openings[0])
        )
        return (*after_role, JsonWriting(_CALL, "", separator=None).held(_CALL, schemas))

    def read(self, source: Source, out: AnswerPieces) -> Reading[None]:
        source.left_out = (*source.left_out, _TURN_END)
        yield from super().read(source, out)

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        yield from source.blanks()
        draft = out.draft(source)
        yield from json_call(source, draft)
        draft.close()
