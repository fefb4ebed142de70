"""Llama 3.2, 4 and Gemma: the answer is a Python list of calls, `[add(a=1, b="x"), now()]`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from actors.scheduling.request import HeldCall, HeldCalls, HeldPart
from app.text.output.call_lists import one_of_several, skip_member
from app.text.output.interface import ToolFormat
from app.text.output.json_text import Calls, dumps, loads, words
from app.text.output.llama3_json import ASKS_FOR_JSON
from app.text.output.pieces import AnswerPieces, Draft
from app.text.output.source import Broken, Reading, Source

_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]+")
_KEY: Final = re.compile(r"[\w.\-]+")  # with letters of any language
_OUTSIDE: Final = re.compile(r"[^\"'()\[\]{},]+")
_CONSTANTS: Final = {"true": True, "false": False, "null": None}  # as in JSON
_IN_STRING: Final = re.compile(r"[^\"'\\]+")
_QUOTED: Final = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_CODES: Final = r"x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}"
_UNESCAPED: Final = re.compile(rf"\\(?:{_CODES}|[^xuUN])|[\n\r\\]", re.DOTALL)  # or an escape
_ESCAPES: Final = {"\n": r"\n", "\r": r"\r", "\\": r"\\"}
_PAIRS: Final = {"(": ")", "[": "]", "{": "}"}


class Pythonic(ToolFormat):
    """Arguments must be keyword literals; anything else is text.

    needs_list: calls without the brackets of a list, one a line, are text also after an opening.
    part: the kind of a held call's arguments.
    """

    recognized_by: ClassVar[tuple[str, ...]] = (
        "<|python_start|>",
        "[func_name1(params_name1=params_value1",
    )
    special_tokens: ClassVar[tuple[str, ...]] = ("<|python_start|>", "<|python_end|>")
    openings = ("<|python_start|>",)
    closing: ClassVar[tuple[str, ...]] = ("<|python_end|>",)
    is_bare = True
    needs_list: ClassVar[bool] = True
    part: ClassVar[str] = "python"

    @classmethod
    def is_of(cls, template: str) -> bool:
        # Llama 4's own template has these marks, but asks for JSON.
        return ASKS_FOR_JSON not in template and super().is_of(template)

    @staticmethod
    def written(calls: Calls) -> str:
        return f"[{', '.join(f'{name}({_written(arguments)})' for name, arguments in calls)}]"

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        """A list, or calls after an opening, that begin as a call of one of the tools."""
        calls = tuple(
            HeldCall(name, (words(f"{name}("), HeldPart(cls.part, schema), words(")")))
            for name, schema in schemas.items()
        )
        listed = [
            HeldCalls(opening, "[ ", calls, ",", "]", may_be_text=True)
            for opening in ("", *cls.openings)
        ]
        if cls.needs_list:
            return tuple(listed)
        return (*listed, HeldCalls(cls.openings[0], "", calls, "", "", may_be_text=True))

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        yield from source.blanks()
        if not opening and (opening := (yield from source.accept(*self.openings))):
            yield from source.blanks()
        is_list = bool((yield from source.accept("[")))
        if not is_list and (self.needs_list or not opening):
            raise Broken
        if is_list:
            yield from self._list(source, out, opening)
        else:
            yield from self._lines(source, out)
        yield from source.blanks()
        yield from source.accept(*self.closing)

    def _list(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        """Calls of a list behind its bracket."""
        marks = self.marks(source, opening)

        def read_end() -> Reading[None]:
            yield from source.blanks()
            yield from source.expect(",", "]")
            source.at -= 1

        def skip(start: int) -> Reading[bool]:
            return skip_member(source, start, marks, "\"'", ",]")

        while True:
            yield from source.blanks()
            is_call = yield from one_of_several(source, out, self._call, read_end, skip)
            yield from source.blanks()
            if (yield from _ends(source, "]")):
                break
        if not is_call:
            raise Broken

    def _lines(self, source: Source, out: AnswerPieces) -> Reading[None]:
        """One a line, up to a closing mark. Another line makes it code: no more of it is called."""
        while True:
            yield from source.blanks()
            draft = out.draft(source)
            yield from self._call(source, draft)
            draft.close()
            yield from source.blanks()
            yield from source.accept(",")
            yield from source.blanks()
            if (yield from source.peek()) in ("", "`", "<"):
                return

    def _call(self, source: Source, draft: Draft) -> Reading[None]:
        draft.begin((yield from source.run(_NAME)))
        yield from self._arguments(source, draft)

    def _arguments(self, source: Source, draft: Draft) -> Reading[None]:
        yield from source.expect("(")
        yield from source.blanks()
        if (yield from source.accept(")")):
            return
        while True:
            key = yield from source.run(_KEY)
            yield from source.blanks()
            if not key:
                raise Broken
            yield from source.expect("=")
            draft.argument(key, _as_json((yield from _literal(source))))
            if (yield from _ends(source, ")")):
                return


class ToolCode(Pythonic):
    """Gemma: the same list, or a block of code with one or more calls."""

    recognized_by = ("<start_of_turn>",)
    special_tokens = ()
    openings = ("```tool_code",)
    closing = ("```",)
    needs_list = False


def _written(arguments: Mapping[str, Any] | str) -> str:
    if isinstance(arguments, str):
        return arguments
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


def _ends(source: Source, bracket: str) -> Reading[bool]:
    """Read the bracket, or a comma, which may also stand before it."""
    if (yield from source.expect(",", bracket)) == ",":
        yield from source.blanks()
        return bool((yield from source.accept(bracket)))
    return True


def _literal(source: Source) -> Reading[str]:
    """A Python literal's text, up to the next comma or bracket."""
    start = source.at
    awaited: list[str] = []  # closing brackets
    while True:
        char = yield from source.peek()
        if not char:
            raise Broken
        if char in "\"'":
            yield from _string(source)
            if (following := (yield from source.peek())).isalnum() or following == "_":
                raise Broken  # an apostrophe, whose like may be far away
        elif char in _PAIRS:
            awaited.append(_PAIRS[char])
            source.at += 1
        elif not awaited and char in ",)":
            return source.text[start : source.at].strip()
        elif char in ")]}":
            if not awaited or awaited.pop() != char:
                raise Broken
            source.at += 1
        elif char == ",":
            source.at += 1
        else:
            yield from source.run(_OUTSIDE)


def _string(source: Source) -> Reading[None]:
    quote = yield from source.peek()
    if (yield from source.accept(quote * 3)):
        quote *= 3
    else:
        source.at += 1
    while not (yield from source.accept(quote)):
        if not (char := (yield from source.peek())):
            raise Broken
        source.at += 1
        if char == "\\":
            yield from source.peek()
            source.at += 1
        yield from source.run(_IN_STRING)


def _as_json(text: str) -> str:
    try:
        tree = _Constants().visit(_parsed(text))
        return json.dumps(ast.literal_eval(tree), allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return dumps(loads(text))  # with escapes that only JSON has


def _parsed(text: str) -> ast.Expression:
    """Models write line ends as they are, and paths such as C:\\Users, which Python refuses."""
    try:
        return ast.parse(text, mode="eval")
    except SyntaxError:
        return ast.parse(_QUOTED.sub(_escaped, text), mode="eval")


def _escaped(quoted: re.Match[str]) -> str:
    return _UNESCAPED.sub(lambda found: _ESCAPES.get(found[0], found[0]), quoted[0])


class _Constants(ast.NodeTransformer):
    """Puts values in place of JSON's constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node
