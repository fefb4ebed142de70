"""Gemma 4: bare keys, and texts between marks of their own; reasoning in a channel.

<|tool_call>call:add{a:1,b:<|"|>xy<|"|>}<tool_call|>

FunctionGemma has other marks:

<start_function_call>call:add{a:1,b:<escape>xy<escape>}<end_function_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

from actors.scheduling.request import HeldCalls
from app.text.output.interface import ToolFormat, ending
from app.text.output.json_text import Calls, held_call, json_string, loads, valid
from app.text.output.pieces import AnswerPieces
from app.text.output.source import Broken, Reading, Source
from app.text.output.thinking import Think

_NAME: Final = re.compile(r"[^\s<>{}]+")
_KEY: Final = re.compile(r"[^\s<>{}\[\]:,]+")
_OTHER: Final = re.compile(r"[^<>{}\[\]:,]+")  # a number, or a word
_CONSTANTS: Final = {"None": "null", "True": "true", "False": "false"}  # as in Python
_MOST_NESTED: Final = 100


class Gemma4Think(Think):
    """The channel's name is part of its beginning."""

    opening = "<|channel>thought"
    closing = "<channel|>"
    recognized_by = ("<|channel>",)
    special_tokens = ("<|channel>", "<channel|>")


class Gemma4(ToolFormat):
    """Values are of JSON, but for texts and keys."""

    recognized_by: ClassVar[tuple[str, ...]] = ("<|tool_call>call:",)
    special_tokens: ClassVar[tuple[str, ...]] = ("<|tool_call>", "<tool_call|>", '<|"|>')
    openings: ClassVar[tuple[str, ...]] = special_tokens[:1]
    closing: ClassVar[tuple[str, ...]] = special_tokens[1:2]
    quote: ClassVar[str] = special_tokens[2]

    @classmethod
    def written(cls, calls: Calls) -> str:
        return "".join(
            f"{cls.openings[0]}call:{name}{_written(given, cls.quote)}{cls.closing[0]}"
            for name, given in calls
        )

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        """With arguments in JSON, which is read too: no grammar has the family's own values."""
        calls = (
            held_call(name, f"call:{name}", schema, cls.closing[0])
            for name, schema in schemas.items()
        )
        return (HeldCalls(cls.openings[0], "", tuple(calls), None, ""),)

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        yield from source.blanks()
        yield from source.expect("call:")
        yield from source.blanks()
        draft = out.draft(source)
        draft.begin((yield from source.run(_NAME)))
        yield from source.blanks()
        yield from _object(source, draft.argument, self.quote, 0)
        yield from ending(source, self.closing[0], opening)
        draft.close()


class FunctionGemma(Gemma4):
    """It has no reasoning."""

    recognized_by = ("<start_function_call>", "<start_function_declaration>")
    special_tokens = ("<start_function_call>", "<end_function_call>", "<escape>")
    openings = special_tokens[:1]
    closing = special_tokens[1:2]
    quote = special_tokens[2]


def _written(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        members = (f"{_key(key, quote)}:{_written(one, quote)}" for key, one in value.items())
        return f"{{{','.join(members)}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(_written(one, quote) for one in value)}]"
    return json.dumps(value)


def _key(key: str, quote: str) -> str:
    return key if _KEY.fullmatch(key) else f"{quote}{key}{quote}"


def _object(
    source: Source, member: Callable[[str, str], None], quote: str, depth: int
) -> Reading[None]:
    """An object; `member` gets each key and the JSON text of its value."""

    def read_member() -> Reading[None]:
        if (yield from source.sees(quote, '"')):
            key = loads((yield from _value(source, quote, depth)))
        elif not (key := (yield from source.run(_KEY))):
            raise Broken
        yield from source.blanks()
        yield from source.expect(":")
        member(key, (yield from _value(source, quote, depth + 1)))

    yield from _listed(source, "{", "}", read_member)


def _listed(
    source: Source, opening: str, closing: str, read: Callable[[], Reading[None]]
) -> Reading[None]:
    """What `read` reads, any number of times between two brackets, with commas between."""
    yield from source.expect(opening)
    yield from source.blanks()
    if (yield from source.accept(closing)):
        return
    while True:
        yield from read()
        yield from source.blanks()
        if (yield from source.expect(",", closing)) == closing:
            return
        yield from source.blanks()


def _value(source: Source, quote: str, depth: int) -> Reading[str]:
    """A value's JSON text."""
    if depth > _MOST_NESTED:
        raise Broken
    yield from source.blanks()
    if (yield from source.accept(quote)):
        text, _ = yield from source.until(quote)
        return json.dumps(text)
    items: list[str] = []
    match (yield from source.peek()):
        case '"':
            return valid((yield from json_string(source)))
        case "[":

            def read_item() -> Reading[None]:
                items.append((yield from _value(source, quote, depth + 1)))

            yield from _listed(source, "[", "]", read_item)
            return f"[{', '.join(items)}]"
        case "{":

            def add(key: str, value: str) -> None:
                items.append(f"{json.dumps(key)}: {value}")

            yield from _object(source, add, quote, depth)
            return f"{{{', '.join(items)}}}"
    word = (yield from source.run(_OTHER)).strip()
    return valid(_CONSTANTS.get(word, word))
