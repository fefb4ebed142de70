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

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from app.text.output.interface import ToolFormat
from app.text.output.json_text import Calls, loads, valid
from app.text.output.pieces import AnswerPieces, Draft
from app.text.output.source import Broken, Reading, Source

_NAME: Final = re.compile(r"[^<>\s]+")
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


class Qwen3Coder(ToolFormat):
    """The tool's schema gives the type of each value. The outer tags are optional because the
    model often omits them.
    """

    recognized_by = ("<function=",)
    special_tokens = ("<tool_call>", "</tool_call>")
    openings = ("<tool_call>", "<function=")
    closing = ("</function>", "</tool_call>")

    @staticmethod
    def written(calls: Calls) -> str:
        return "\n".join(
            f"<tool_call>\n<function={name}>\n{_written(arguments)}</function>\n</tool_call>"
            for name, arguments in calls
        )

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        draft = out.draft(source)
        if opening == "<tool_call>":
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
        if found == "</tool_call>":  # models leave the inner tag out
            return
        yield from source.blanks()
        yield from source.accept("</tool_call>")

    def _parameter(self, source: Source, draft: Draft) -> Reading[None]:
        key = yield from source.run(_NAME)
        yield from source.expect(">")
        value, _ = yield from source.until("</parameter>")
        add_argument(draft, key, _unframed(value))


def _written(arguments: Mapping[str, Any] | str) -> str:
    if isinstance(arguments, str):
        return f"{arguments}\n"
    return "".join(
        f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts_of(arguments).items()
    )


def _unframed(text: str) -> str:
    """The text without the line ends between a value and its tags."""
    return text.removeprefix("\n").removesuffix("\n")


def texts_of(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Values as they stand between tags: strings as they are, others as JSON."""
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in arguments.items()
    }


def add_argument(draft: Draft, key: str, text: str) -> None:
    """The argument that stands between tags, by the type that the tool declares."""
    properties = draft.schema.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    draft.argument(key, typed(schema, text))


def typed(schema: Any, text: str) -> str:
    """A value's JSON text by the type its schema declares; what is of no such type is a string.

    Without a declared type, valid JSON is taken as JSON.
    """
    types = _types(schema) or [*_TYPES, "string"]
    for kind in types:
        if kind in _TYPES and _is(kind, text):
            return valid(text.strip())
        if kind == "boolean" and text.strip().lower() in ("true", "false"):  # True, as in Python
            return text.strip().lower()
    return json.dumps(text)


def _types(schema: Any) -> list[str]:
    """The declared types; none where the schema, which is the client's, is no proper one."""
    if not isinstance(schema, Mapping):
        return []
    declared = schema.get("type")
    if isinstance(declared, str):
        return [declared]
    if isinstance(declared, list):
        return [kind for kind in declared if isinstance(kind, str)]
    branches = schema.get("anyOf")
    return [kind for one in branches for kind in _types(one)] if isinstance(branches, list) else []


def _is(kind: str, text: str) -> bool:
    try:
        value = loads(text)
    except Broken:
        return False
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
