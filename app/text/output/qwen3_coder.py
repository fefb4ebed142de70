"""Qwen3-Coder: tags instead of JSON.

<tool_call>
<function=add>
<parameter=a>
1
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar, Final

from actors.scheduling.request import HeldCall, HeldCalls
from app.text.output.interface import ToolFormat
from app.text.output.json_text import Calls, words
from app.text.output.pieces import AnswerPieces, Draft
from app.text.output.source import Reading, Source
from app.text.output.tags import Tags, lines

_NAME: Final = re.compile(r"[^<>\s]+")
_KEY: Final = re.compile(r"[^<>\r\n]+")  # with blanks in it


class Qwen3Coder(ToolFormat):
    """The tool's schema gives the type of each value. The outer tags are optional because the
    model often omits them.
    """

    recognized_by = ("<function=",)
    special_tokens = ("<tool_call>", "</tool_call>")
    openings = ("<tool_call>", "<function=")
    closing = ("</function>", "</tool_call>")
    tags: ClassVar[Tags] = Tags("<parameter=", ">", "</parameter>", "\n")

    @classmethod
    def written(cls, calls: Calls) -> str:
        begin, end = cls.openings[0], cls.closing[1]
        return "\n".join(
            f"{begin}\n<function={name}>\n{cls.tags.written(arguments)}</function>\n{end}"
            for name, arguments in calls
        )

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        inner = {
            name: (*lines(f"{name}>\n"), *arguments, words("</function>"))
            for name, arguments in cls.tags.held(schemas).items()
        }
        begin, end = lines("\n<function="), lines(f"\n{cls.closing[1]}")
        outer = tuple(HeldCall(name, (*begin, *parts, *end)) for name, parts in inner.items())
        bare = tuple(HeldCall(name, parts) for name, parts in inner.items())
        return (
            HeldCalls(cls.openings[0], "", outer, None, ""),
            HeldCalls(cls.openings[1], "", bare, None, ""),
        )

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        draft = out.draft(source)
        if opening == self.openings[0]:
            yield from source.blanks()
            yield from source.expect("<function=")
        draft.begin((yield from source.run(_NAME)))
        yield from source.expect(">")
        while True:
            yield from source.blanks()
            found = yield from source.expect("<parameter=", *self.closing)
            if found != "<parameter=":
                break
            yield from self._parameter(source, draft)
        draft.close()
        if found == self.closing[1]:  # models leave the inner tag out
            return
        yield from source.blanks()
        yield from source.accept(self.closing[1])

    def _parameter(self, source: Source, draft: Draft) -> Reading[None]:
        key = yield from source.run(_KEY)
        yield from source.expect(">")
        yield from self.tags.read(source, draft, key.strip())
