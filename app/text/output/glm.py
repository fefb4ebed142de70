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
from typing import ClassVar, Final

from actors.scheduling.request import HeldCall, HeldCalls
from app.text.output.call_lists import one_of_several
from app.text.output.interface import ToolFormat, ending
from app.text.output.json_text import (
    Calls,
    JsonWriting,
    held_call,
    json_arguments,
    json_call,
    words,
)
from app.text.output.pieces import AnswerPieces, Draft
from app.text.output.source import Broken, Reading, Source
from app.text.output.tags import Tags, lines
from app.text.output.thinking import Think

_NAME: Final = re.compile(r"[^<>{}\s]+")
_KEY: Final = re.compile(r"[^<>]+")  # with blanks in it and around it


class Glm45(ToolFormat):
    """The tool's schema gives the type of each value. Line ends around tags are optional."""

    recognized_by: ClassVar[tuple[str, ...]] = ("<arg_key>",)
    special_tokens: ClassVar[tuple[str, ...]] = (
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    )
    openings: ClassVar[tuple[str, ...]] = special_tokens[:1]
    closing: ClassVar[tuple[str, ...]] = special_tokens[1:2]
    tags: ClassVar[Tags] = Tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>")
    separator: ClassVar[str] = ""  # behind a name

    @classmethod
    def written(cls, calls: Calls) -> str:
        return "\n".join(
            f"{cls.openings[0]}{name}\n{cls.tags.written(arguments)}{cls.closing[0]}"
            for name, arguments in calls
        )

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        calls = (
            HeldCall(name, (*lines(f"{name}\n"), *arguments, words(cls.closing[0])))
            for name, arguments in cls.tags.held(schemas).items()
        )
        return (HeldCalls(cls.openings[0], "", tuple(calls), None, ""),)

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        draft = out.draft(source)
        yield from source.blanks()
        draft.begin((yield from source.run(_NAME)))
        if self.separator:
            yield from source.blanks()
            yield from source.accept(self.separator)
        key_end, value_begin = self.tags.middle.split("\n")
        while True:
            yield from source.blanks()
            if (yield from source.expect(self.tags.begin, self.closing[0])) != self.tags.begin:
                break
            key = yield from source.run(_KEY)
            yield from source.expect(key_end)
            yield from source.blanks()
            yield from source.expect(value_begin)
            yield from self.tags.read(source, draft, key.strip())
        draft.close()


class LongCat(Glm45):
    """The same between other tags; earlier models write JSON there."""

    recognized_by = ("<longcat_tool_call>",)
    special_tokens = (
        "<longcat_tool_call>",
        "</longcat_tool_call>",
        "<longcat_arg_key>",
        "</longcat_arg_key>",
        "<longcat_arg_value>",
        "</longcat_arg_value>",
    )
    openings = special_tokens[:1]
    closing = special_tokens[1:2]
    tags = Tags(
        "<longcat_arg_key>", "</longcat_arg_key>\n<longcat_arg_value>", "</longcat_arg_value>"
    )
    writing = JsonWriting(f"{openings[0]}\n", f"\n{closing[0]}", separator=None)

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        return (*super().held(schemas), cls.writing.held(cls.openings[0], schemas))

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        yield from source.blanks()
        if (yield from source.peek()) != "{":
            yield from super().read_calls(source, out, opening)
            return
        draft = out.draft(source)
        yield from json_call(source, draft)
        yield from ending(source, self.closing[0], opening)
        draft.close()


class LongCatThink(Think):
    """LongCat's."""

    opening = "<longcat_think>"
    closing = "</longcat_think>"
    recognized_by = ("<longcat_think>",)
    special_tokens = ("<longcat_think>", "</longcat_think>")


class Glm4(ToolFormat):
    """As the whole answer, or at its beginning. Behind a malformed call that follows another one, a
    line that is a tool's name, before one that begins an object, begins a call.
    """

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
        marks = tuple(f"\n{name}\n{{" for name in out.tools)

        def skip(start: int) -> Reading[bool]:
            source.at = start
            return bool((yield from source.go_to(*marks)))

        following = True
        while following:
            yield from source.blanks()
            yield from one_of_several(source, out, _named_call, source.blanks, skip)
            following = bool((yield from source.peek()))


def _named_call(source: Source, draft: Draft) -> Reading[None]:
    draft.begin((yield from source.run(_NAME)))
    yield from source.blanks()
    if (yield from source.peek()) != "{":
        raise Broken
    yield from json_arguments(source, draft)
