"""Kimi K3: tags of three tokens, each with a name and attributes, around all parts of an answer.

<|open|>think<|sep|>I add.<|close|>think<|sep|><|open|>response<|sep|>So:<|close|>response<|sep|>
<|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|>
<|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|>
<|close|>tools<|sep|><|close|>message<|sep|>

Without the line ends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from actors.scheduling.request import HeldCall, HeldCalls, HeldPart
from app.text.output.json_text import Calls, json_arguments, words
from app.text.output.minimax_m2 import MiniMaxM2
from app.text.output.pieces import AnswerPart, AnswerPieces, Draft
from app.text.output.source import Broken, Reading, Source
from app.text.output.tags import Tags
from app.text.output.thinking import Think

_OPEN, _CLOSE, _TAG_END = "<|open|>", "<|close|>", "<|sep|>"
_TYPES: Final = {dict: "object", list: "array", bool: "boolean", type(None): "null"}
_KINDS: Final = ("string", "number", "integer", *_TYPES.values())
_ATTRIBUTES: Final = re.compile(r"[^<>\r\n]+")
_NAME: Final = re.compile(r'(.*?)"(?: index="[0-9]*")?')
_NUMBER: Final = HeldPart("until", f'"{_TAG_END}', (HeldPart("match", "[1-9][0-9]{0,3}"),))


def _around(name: str) -> tuple[str, str]:
    return f"{_OPEN}{name}{_TAG_END}", f"{_CLOSE}{name}{_TAG_END}"


_ALL, _ALL_END = _around("tools")
_RESPONSE, _RESPONSE_END = _around("response")
_MESSAGE_END: Final = _around("message")[1]
_BLOCK, _BLOCK_END = f'{_OPEN}json type="object"{_TAG_END}', _around("json")[1]


class KimiK3Think(Think):
    """Reasoning, and the answer's text without the tags around it."""

    opening, closing = _around("think")
    recognized_by = (opening, _RESPONSE)
    special_tokens = (_OPEN, _CLOSE, _TAG_END)
    heads = (_RESPONSE, "")
    tail = f"{_RESPONSE_END}{_MESSAGE_END}"

    def read(self, source: Source, out: AnswerPieces) -> Reading[None]:
        yield from super().read(source, out)
        source.left_out = (_RESPONSE, _RESPONSE_END, _MESSAGE_END)
        start = source.at
        out.part = AnswerPart.ANSWER
        yield from source.blanks()
        if not (yield from source.sees(*source.left_out)):
            source.at = start


class _K3Tags(Tags):
    """With the type of each value; names are escaped as in XML."""

    __slots__ = ()

    def written_key(self, key: str) -> str:
        return _escaped(key)

    def kind_of(self, value: Any) -> str:
        kind = "string" if isinstance(value, str) else _TYPES.get(type(value), "number")
        return f'{kind}"{_TAG_END}'


class KimiK3(MiniMaxM2):
    """A type that is not of a text is not looked at: the value is JSON. All arguments may also
    stand in one block of JSON.
    """

    recognized_by = (_ALL, f"{_OPEN}call tool=")
    special_tokens = KimiK3Think.special_tokens
    openings = (_ALL,)
    closing = (_around("call")[1], _ALL_END)
    call = f'{_OPEN}call tool="'
    tags = _K3Tags(
        f'{_OPEN}argument key="',
        '" type="',
        _around("argument")[1],
        kinds=tuple(f'{kind}"{_TAG_END}' for kind in _KINDS),
    )
    argument = tags.begin

    @classmethod
    def written(cls, calls: Calls) -> str:
        ones = [
            f'{cls.call}{_escaped(name)}" index="{number}"{_TAG_END}'
            f"{_on_one_line(cls.tags, given)}{cls.closing[0]}"
            for number, (name, given) in enumerate(calls, 1)
        ]
        return f"{_ALL}{''.join(ones)}{_ALL_END}" if ones else ""

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        calls = tuple(
            HeldCall(
                name,
                (
                    words(f'{cls.call}{_escaped(name)}" index="'),
                    _NUMBER,
                    *arguments,
                    words(cls.closing[0]),
                ),
            )
            for name, arguments in cls.tags.held(schemas).items()
        )
        return (HeldCalls(_ALL, "", calls, "", _ALL_END),)

    def _call(self, source: Source, draft: Draft) -> Reading[None]:
        name = _NAME.fullmatch((yield from _attributes(source)))
        if name is None:
            raise Broken
        draft.begin(_unescaped(name[1]))
        yield from self._arguments(source, draft)

    def _arguments(self, source: Source, draft: Draft) -> Reading[None]:
        yield from source.blanks()
        if (yield from source.accept(_BLOCK)):
            yield from source.blanks()
            yield from json_arguments(source, draft)
            yield from source.blanks()
            yield from source.expect(_BLOCK_END)
        yield from super()._arguments(source, draft)

    def _argument(self, source: Source, draft: Draft) -> Reading[None]:
        given = yield from _attributes(source)
        key, middle, kind = given.rpartition(self.tags.middle)
        if not middle or not kind.endswith('"'):
            raise Broken
        is_text = kind == 'string"'
        yield from self.tags.read(source, draft, _unescaped(key), is_text=is_text)


def _on_one_line(tags: Tags, given: Mapping[str, Any] | str) -> str:
    if isinstance(given, str):
        return given
    return "".join(tags.written({key: value})[:-1] for key, value in given.items())


def _attributes(source: Source) -> Reading[str]:
    """What stands in a tag up to its end."""
    given = yield from source.run(_ATTRIBUTES)
    yield from source.expect(_TAG_END)
    return given


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")


def _unescaped(text: str) -> str:
    return text.replace("&quot;", '"').replace("&amp;", "&")
