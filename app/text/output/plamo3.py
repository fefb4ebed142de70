"""PLaMo 3: a name and an object, each between marks of its own, in a request between marks.

<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|>
<|plamo:begin_tool_name:plamo|>add<|plamo:end_tool_name:plamo|>
<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{"a": 1}
<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>
<|plamo:end_tool_requests:plamo|>

Without the line ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

from actors.scheduling.request import HeldCall, HeldCalls
from app.text.output.interface import ToolFormat, ending, maybe_end
from app.text.output.json_text import Calls, held_call, json_arguments, maybe, words
from app.text.output.pieces import AnswerPieces, Draft
from app.text.output.source import Reading, Source
from app.text.output.thinking import Think

# A mark is a name between two of these, which are tokens.
_BEGIN, _END, _REST = "<|plamo:begin_", "<|plamo:end_", ":plamo|>"


def _around(name: str) -> tuple[str, str]:
    return f"{_BEGIN}{name}{_REST}", f"{_END}{name}{_REST}"


_ALL, _ALL_END = _around("tool_requests")
_ONE, _ONE_END = _around("tool_request")
_NAME, _NAME_END = _around("tool_name")
_ARGUMENTS, _ARGUMENTS_END = _around("tool_arguments")
_JSON, _TEXT = "<|plamo:constrain|>json", "<|plamo:msg|>"
_WORD: Final = re.compile(r"[^<>{}\s]+")


class Plamo3Think(Think):
    """Between marks."""

    opening, closing = _around("think")
    recognized_by = (opening,)
    special_tokens = (_BEGIN, _END, _REST)


class Plamo3(ToolFormat):
    """The marks around all calls may be missing, as may those before the object."""

    recognized_by = (_ALL, _ONE, _NAME)
    special_tokens = (*Plamo3Think.special_tokens, _JSON.removesuffix("json"), _TEXT)
    openings = (_ALL, _ONE)
    closing = (_ONE_END, _ALL_END)

    @staticmethod
    def written(calls: Calls) -> str:
        texts = [
            (name, given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))
            for name, given in calls
        ]
        ones = [
            f"{_ONE}{_NAME}{name}{_NAME_END}{_ARGUMENTS}{_JSON}{_TEXT}{text}"
            f"{_ARGUMENTS_END}{_ONE_END}"
            for name, text in texts
        ]
        return f"{_ALL}{''.join(ones)}{_ALL_END}" if ones else ""

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        end = f"{_ARGUMENTS_END}{_ONE_END}"
        bare = []
        for name, schema in schemas.items():
            name_only, given, rest = held_call(
                name, f"{_NAME}{name}{_NAME_END}{_ARGUMENTS}", schema, end
            ).parts
            bare.append(HeldCall(name, (name_only, maybe(words(_JSON)), words(_TEXT), given, rest)))
        whole = tuple(HeldCall(call.name, (words(_ONE), *call.parts)) for call in bare)
        return (
            HeldCalls(_ALL, "", whole, "", _ALL_END),
            HeldCalls(_ONE, "", tuple(bare), None, ""),
        )

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        if opening == _ALL:
            yield from source.blanks()
            yield from source.expect(_ONE)
        following = True
        while following:
            draft = out.draft(source)
            yield from _call(source, draft)
            draft.close()
            yield from source.blanks()
            following = bool((yield from source.accept(_ONE)))
        yield from maybe_end(source, _ALL_END)


def _call(source: Source, draft: Draft) -> Reading[None]:
    """What stands behind the mark of a request, and its end."""
    yield from source.blanks()
    yield from source.expect(_NAME)
    draft.begin((yield from source.run(_WORD)))
    for mark in (_NAME_END, _ARGUMENTS):
        yield from source.blanks()
        yield from source.expect(mark)
    for mark in (_JSON, _TEXT):
        yield from source.blanks()
        yield from source.accept(mark)
    yield from source.blanks()
    yield from json_arguments(source, draft)
    yield from ending(source, _ARGUMENTS_END, _ONE_END, _ONE, _ALL_END)
    yield from ending(source, _ONE_END, _ONE, _ALL_END)
