"""GLM-4.5, 4.6 and 4.7: tags instead of JSON; GLM-4: a name and an object on two lines.

<tool_call>add
<arg_key>a</arg_key>
<arg_value>1</arg_value>
</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

from actors.scheduling.request import HeldCall, HeldCalls
from app.text.output.interface import ToolFormat
from app.text.output.json_text import Calls, held_call, json_arguments, words
from app.text.output.pieces import AnswerPieces, Draft
from app.text.output.source import Broken, Reading, Source
from app.text.output.tags import Tags, lines

_NAME: Final = re.compile(r"[^<>{}\s]+")
_TAGS: Final = Tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>")


class Glm45(ToolFormat):
    """The tool's schema gives the type of each value. Line ends around tags are optional."""

    recognized_by = ("<arg_key>",)
    special_tokens = (
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    )
    openings = ("<tool_call>",)
    closing = ("</tool_call>",)

    @staticmethod
    def written(calls: Calls) -> str:
        return "\n".join(
            f"<tool_call>{name}\n{_TAGS.written(arguments)}</tool_call>"
            for name, arguments in calls
        )

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        calls = (
            HeldCall(name, (*lines(f"{name}\n"), *arguments, words("</tool_call>")))
            for name, arguments in _TAGS.held(schemas).items()
        )
        return (HeldCalls(cls.openings[0], "", tuple(calls), None, ""),)

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        draft = out.draft(source)
        yield from source.blanks()
        draft.begin((yield from source.run(_NAME)))
        while True:
            yield from source.blanks()
            if (yield from source.expect("<arg_key>", "</tool_call>")) == "</tool_call>":
                break
            yield from _argument(source, draft)
        draft.close()


class Glm4(ToolFormat):
    """As the whole answer, or at its beginning."""

    recognized_by = ("在调用上述函数时",)  # "when you call the functions above"
    is_bare = True

    @staticmethod
    def written(calls: Calls) -> str:
        texts = [
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            for _, arguments in calls
        ]
        return "\n".join(f"{name}\n{text}" for (name, _), text in zip(calls, texts, strict=True))

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        """An answer that begins with a tool's name on a line of its own calls it."""
        calls = tuple(held_call(name, f"{name}\n", schema) for name, schema in schemas.items())
        return (HeldCalls("", "", calls, "\n", "", may_be_text=True),)

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        following = True
        while following:
            yield from source.blanks()
            draft = out.draft(source)
            draft.begin((yield from source.run(_NAME)))
            yield from source.blanks()
            if (yield from source.peek()) != "{":
                raise Broken
            yield from json_arguments(source, draft)
            draft.close()
            yield from source.blanks()
            following = bool((yield from source.peek()))


def _argument(source: Source, draft: Draft) -> Reading[None]:
    key, _ = yield from source.until("</arg_key>")
    yield from source.blanks()
    yield from source.expect("<arg_value>")
    yield from _TAGS.read(source, draft, key.strip())
