"""MiniMax-M2: tags with names as attributes, and marks around all calls.

<minimax:tool_call>
<invoke name="add">
<parameter name="a">1</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from actors.scheduling.request import HeldCall, HeldCalls
from app.text.output.interface import ToolFormat, maybe_end
from app.text.output.json_text import Calls, words
from app.text.output.pieces import AnswerPieces
from app.text.output.source import Broken, Reading, Source
from app.text.output.tags import Tags, lines

_ALL, _ALL_END = "<minimax:tool_call>", "</minimax:tool_call>"
_CALL, _CALL_END = '<invoke name="', "</invoke>"
_NAME: Final = re.compile(r"[^<>\r\n]+")  # a parameter's may have blanks
_TAGS: Final = Tags('<parameter name="', '">', "</parameter>")


class MiniMaxM2(ToolFormat):
    """The tool's schema gives the type of each value."""

    recognized_by = (_ALL,)
    special_tokens = (_ALL, _ALL_END)
    openings = (_ALL,)
    closing = (_CALL_END, _ALL_END)

    @staticmethod
    def written(calls: Calls) -> str:
        ones = [
            f'{_CALL}{name}">\n{_TAGS.written(arguments)}{_CALL_END}\n' for name, arguments in calls
        ]
        return f"{_ALL}\n{''.join(ones)}{_ALL_END}" if ones else ""

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        calls = tuple(
            HeldCall(name, (*lines(f'{_CALL}{name}">\n'), *arguments, words(_CALL_END)))
            for name, arguments in _TAGS.held(schemas).items()
        )
        return (HeldCalls(_ALL, "\n", calls, "\n", f"\n{_ALL_END}"),)

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        yield from source.blanks()
        yield from source.expect(_CALL)
        while True:
            draft = out.draft(source)
            draft.begin((yield from _name(source)))
            while True:
                yield from source.blanks()
                if (yield from source.expect(_TAGS.begin, _CALL_END)) == _CALL_END:
                    break
                key = yield from _name(source)
                yield from _TAGS.read(source, draft, key)
            draft.close()
            yield from source.blanks()
            if not (yield from source.accept(_CALL)):
                break
        yield from maybe_end(source, _ALL_END)


def _name(source: Source) -> Reading[str]:
    """A name up to the end of its tag; it may hold quotation marks itself."""
    given = yield from source.run(_NAME)
    if not given.endswith('"'):
        raise Broken
    yield from source.expect(">")
    return given[:-1]
