"""Incremental reading of JSON, and of tool calls written in JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from actors.scheduling.request import HeldCall, HeldCalls, HeldPart
from app.text.output.pieces import Draft
from app.text.output.source import Broken, Reading, Source

_IN_STRING: Final = re.compile(r'[^"\\]+')
_OUTSIDE: Final = re.compile(r'[^"{}\[\],]+')

_INPUT_BEGINS: Final = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_UNIT: Final = r"\\u[0-9a-fA-F]{4}"
_FIRST_HALF, _SECOND_HALF = r"\\u[dD][89abAB]", r"\\u[dD][c-fC-F]"  # of a surrogate pair
_WHOLE_CHARS: Final = re.compile(  # a half is whole once what follows is read
    rf'(?:[^"\\]+|\\[^u]|(?!{_FIRST_HALF}){_UNIT}|{_UNIT}(?={_SECOND_HALF}){_UNIT}'
    rf"|{_UNIT}(?=[^\\]|\\[^u]|(?!{_SECOND_HALF}){_UNIT}))*"
)

INPUT: Final = "input"  # the argument that holds the text for a custom tool
NAME_KEYS: Final = ("name", "function", "tool_name")
ARGUMENT_KEYS: Final = ("arguments", "parameters")
OTHER_KEYS: Final = ("id", "type", "tool_call_id")  # written by some models, ignored

# Names and arguments of calls; arguments that are no object stay text.
Calls = Sequence[tuple[str, Mapping[str, Any] | str]]


def loads(text: str) -> Any:
    """Parse; raises Broken. Strings may hold line ends as they are, as some models write them."""
    try:
        return json.loads(text, parse_constant=_refuse, strict=False)
    except (ValueError, RecursionError):
        raise Broken from None


def valid(text: str) -> str:
    """The JSON text of what `loads` takes: unchanged where it is strictly JSON; raises Broken."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return dumps(loads(text))
    return text


def dumps(value: Any) -> str:
    """A value's JSON text; raises Broken for a number that JSON cannot hold."""
    try:
        return json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        raise Broken from None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def json_string(source: Source) -> Reading[str]:
    """A string's JSON text."""
    start = source.at
    yield from source.expect('"')
    while True:
        yield from source.run(_IN_STRING)
        char = yield from source.peek()
        if not char:
            raise Broken
        source.at += 1
        if char == '"':
            return source.text[start : source.at]
        yield from source.peek()  # the escaped character
        source.at += 1


def json_value(source: Source) -> Reading[str]:
    """A value's JSON text; raises Broken if it is not valid."""
    start = source.at
    depth = 0
    while True:
        char = yield from source.peek()
        if not char:
            raise Broken
        if char == '"':
            yield from json_string(source)
            if depth:  # one that lacks an escape is not looked for far away
                yield from source.blanks()
                if (yield from source.peek()) not in ",:]}":
                    raise Broken
        elif char in "{[":
            depth += 1
            source.at += 1
        elif char in "}]" and depth:
            depth -= 1
            source.at += 1
        elif char in "}]" or (char == "," and not depth):
            break  # ends a number, true, false or null
        elif char == ",":
            source.at += 1
            continue
        else:
            yield from source.run(_OUTSIDE)
            continue
        if not depth:
            break
    return valid(source.text[start : source.at].strip())


def json_object(source: Source, member: Callable[[str], Reading[None]]) -> Reading[None]:
    """An object; `member` reads the value of each key."""
    yield from source.expect("{")
    yield from source.blanks()
    if (yield from source.accept("}")):
        return
    while True:
        key = loads((yield from json_string(source)))
        yield from source.blanks()
        yield from source.expect(":")
        yield from source.blanks()
        yield from member(key)
        yield from source.blanks()
        if (yield from source.expect(",", "}")) == "}":
            return
        yield from source.blanks()


def json_arguments(source: Source, draft: Draft) -> Reading[None]:
    """An object of arguments; some models write it as a string, or null for none."""
    char = yield from source.peek()
    if char == "{":

        def argument(key: str) -> Reading[None]:
            draft.argument(key, (yield from json_value(source)))

        yield from json_object(source, argument)
        draft.is_whole = True
        return
    given = loads((yield from json_value(source)))
    if isinstance(given, str):
        given = loads(given)
    if given is None:
        return
    if not isinstance(given, dict):
        raise Broken
    for key, value in given.items():
        draft.argument(key, dumps(value))


def json_call(source: Source, draft: Draft) -> Reading[None]:
    """`{"name": ..., "arguments": {...}}`, in either order, or the same as `"function": {...}`."""
    seen: set[str] = set()

    def member(key: str) -> Reading[None]:
        is_nested = key == "function" and key not in seen and (yield from source.peek()) == "{"
        if is_nested:  # as in OpenAI's API
            seen.add(key)
            yield from json_object(source, member)
            return
        kind = "name" if key in NAME_KEYS else "arguments" if key in ARGUMENT_KEYS else key
        is_declared = "function" in seen and key == "parameters"  # which shows a tool, calls none
        if is_declared or kind in seen or kind not in ("name", "arguments", *OTHER_KEYS):
            raise Broken
        seen.add(kind)
        if kind == "arguments":
            yield from json_arguments(source, draft)
            return
        value = loads((yield from json_value(source)))
        if kind == "name":
            draft.begin(value)

    yield from json_object(source, member)
    if draft.name is None:
        raise Broken


def words(text: str) -> HeldPart:
    """This very text in a call."""
    return HeldPart("text", text)


def maybe(*parts: HeldPart) -> HeldPart:
    """These parts of a call, or nothing."""
    return HeldPart("maybe", parts=parts)


def one_of(*parts: HeldPart) -> HeldPart:
    """One of these parts of a call."""
    return parts[0] if len(parts) == 1 else HeldPart("one", parts=parts)


def held_call(name: str, before: str, schema: str, after: str = "") -> HeldCall:
    """One whose arguments are an object of this schema between two texts."""
    return HeldCall(name, (words(before), HeldPart("json", schema), words(after)))


@dataclass(frozen=True, slots=True)
class JsonWriting:
    """How a family writes calls as objects: `begin`, all of them with `separator` between, `end`;
    with None each is written so, on lines of their own. name_key, key: of name and arguments.
    """

    begin: str = "["
    end: str = "]"
    separator: str | None = ", "
    name_key: str = "name"
    key: str = "arguments"

    def written(self, calls: Calls) -> str:
        texts = [
            json.dumps({self.name_key: name, self.key: arguments}, ensure_ascii=False)
            for name, arguments in calls
        ]
        if self.separator is None:
            return "\n".join(f"{self.begin}{text}{self.end}" for text in texts)
        return f"{self.begin}{self.separator.join(texts)}{self.end}" if texts else ""

    def held(self, opening: str, schemas: Mapping[str, str]) -> HeldCalls:
        """Calls of these tools, in this way, held to the schemas of their arguments."""
        keys = (f'{{"{self.name_key}": ', f', "{self.key}": ')
        calls = [
            held_call(name, f"{keys[0]}{json.dumps(name)}{keys[1]}", schema, "}")
            for name, schema in schemas.items()
        ]
        head = self.begin.removeprefix(opening)
        return HeldCalls(opening, head, tuple(calls), self.separator, self.end)


class InputText:
    """Reads a custom tool's text out of a call's arguments, `{"input": ...}`, while they grow."""

    def __init__(self) -> None:
        self._unread = ""
        self._has_begun = False

    def push(self, arguments: str) -> str:
        """More of the text."""
        self._unread += arguments
        if not self._has_begun:
            begin = _INPUT_BEGINS.match(self._unread)
            if begin is None:
                return ""
            self._has_begun = True
            self._unread = self._unread[begin.end() :]
        found = _WHOLE_CHARS.match(self._unread)
        end = 0 if found is None else found.end()
        text, self._unread = self._unread[:end], self._unread[end:]
        try:
            return _text(loads(f'"{text}"'))
        except Broken:
            return text

    def finish(self) -> str:
        """What is given in place of the text, if the arguments do not begin with it: the text that
        comes later, the only text, or the arguments as they are."""
        if self._has_begun:
            return ""
        try:
            given = loads(self._unread)
        except Broken:  # they break off
            return ""
        values = list(given.values()) if isinstance(given, dict) else [given]
        if isinstance(given, dict) and isinstance(given.get(INPUT), str):
            values = [given[INPUT]]
        if len(values) == 1 and isinstance(values[0], str):
            return _text(values[0])
        return self._unread if values else ""


def _text(text: str) -> str:
    """The text, whose halves of surrogate pairs no encoding has."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
