"""Translates each kind of `Grammar` for xgrammar, and judges how long its masks take: for the
stages and for the API's check."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

# JSON is written on one line, as json.dumps does. Where any whitespace is allowed, a small model
# may write blanks for ever and the value never ends; and each blank costs a token's time.
_LAYOUT: Final = {"any_whitespace": False, "separators": (", ", ": ")}
_ANY_OBJECT: Final = '{"type":"object"}'
_NAMED_SCHEMAS: Final = frozenset(
    {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
)
# Of strings, that xgrammar keeps; it takes any other for a remark.
FORMATS: Final = frozenset(
    {"date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"}
    | {"uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"}
)
_CHAR: Final = r'[^"\\\x00-\x1f]'  # of a JSON string, unescaped
_MOST_REPEATED: Final = 128
_MOST_COMPARED: Final = 4_000_000  # states times tokens; some 0.2 s a million
_VALUES: Final = frozenset({"const", "enum", "default", "examples"})


class MaskTime:
    """Whether a grammar's masks take too long, as those of one that matches a text in very many
    ways do: they are made within the step, in which all other streams wait.

    A mask of a usual grammar takes well below `FAIR_S`, and so does moving past a token. `is_up`
    once all together have taken `MOST_S` more. clock: the processor time of this thread, so that a
    busy machine makes no grammar slow.
    """

    FAIR_S: ClassVar = 0.001
    MOST_S: ClassVar = 0.2

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self.clock = clock
        self._over_s = 0.0

    @property
    def is_up(self) -> bool:
        return self._over_s > self.MOST_S

    def add(self, begin_s: float) -> None:
        """One mask or token has taken from then until now."""
        self._over_s = max(0.0, self._over_s + self.clock() - begin_s - self.FAIR_S)


def compile_grammar(compiler: Any, kind: str, text: str, vocab_size: int = 1) -> Any:
    """Compile a grammar's kind and text; raises what xgrammar raises, ValueError among them.
    vocab_size: of its tokenizer, for `bounds_as_patterns`."""
    match kind:
        case "json_object":
            return compiler.compile_json_schema(_ANY_OBJECT, **_LAYOUT)
        case "json_schema":
            schema = bounds_as_patterns(json.loads(text), vocab_size)
            return compiler.compile_json_schema(json.dumps(schema, ensure_ascii=False), **_LAYOUT)
        case "regex":
            return compiler.compile_regex(text)
        case "ebnf":
            return compiler.compile_grammar(text)
        case "choice":
            return compiler.compile_grammar(ebnf_of_choices(_choices(text)))
    raise ValueError(f"grammar kind {kind!r} is unknown")


class _Room:
    """States of patterns that a grammar has room for: xgrammar compares each with every token. A
    repetition of more than 128 it does not compile, but finds its tokens anew for each mask."""

    def __init__(self, vocab_size: int) -> None:
        self._num_left = _MOST_COMPARED // vocab_size

    def takes(self, num_states: int) -> bool:
        if num_states > min(_MOST_REPEATED, self._num_left):
            return False
        self._num_left -= num_states
        return True


def bounds_as_patterns(schema: Any, vocab_size: int = 1) -> Any:
    """The schema with minLength and maxLength of strings written as patterns, or left out where
    they are too large for a vocabulary of this size.

    xgrammar (0.2.8; its issue 800) allows raw control characters in strings with such bounds, which
    is not JSON; strings with a pattern are right. With bounds of some hundred, its masks would take
    tens of milliseconds, and so would each step.
    """
    return _rewritten(schema, _Room(vocab_size))


def _rewritten(schema: Any, room: _Room) -> Any:
    if isinstance(schema, list):
        return [_rewritten(one, room) for one in schema]
    if not isinstance(schema, dict):
        return schema
    changed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED_SCHEMAS and isinstance(value, dict):
            changed[key] = {name: _rewritten(one, room) for name, one in value.items()}
        else:
            changed[key] = value if key in _VALUES else _rewritten(value, room)
    has_form = "pattern" in schema or str(schema.get("format")) in FORMATS
    if not has_form and (bounds := _bounds(schema)) is not None:
        changed.pop("minLength", None)
        changed.pop("maxLength", None)
        if pattern := _pattern(*bounds, room):
            changed["pattern"] = pattern
    return changed


def _bounds(schema: dict[str, Any]) -> tuple[int, int | None] | None:
    """The least and the most characters of a string schema; None where it has no valid bounds."""
    if "string" not in (schema.get("type"), *_listed(schema.get("type"))):
        return None
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    if type(low) is not int or low < 0 or (high is None and not low):
        return None
    return None if high is not None and (type(high) is not int or high < low) else (low, high)


def _pattern(low: int, high: int | None, room: _Room) -> str | None:
    if high is not None and room.takes(high):
        return f"^{_CHAR}{{{low},{high}}}$"
    if low > 1 and not room.takes(low):
        low = 1
    return f"^{_CHAR}{{{low},}}$" if low else None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def ebnf_of_choices(choices: Sequence[str]) -> str:
    """A grammar (GBNF, as xgrammar reads it) of exactly these strings.

    >>> ebnf_of_choices(["yes", "no"])
    'root ::= "yes" | "no"'
    """
    return "root ::= " + " | ".join(_literal(choice) for choice in choices)


def _choices(text: str) -> list[str]:
    choices = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) for c in choices):
        raise ValueError("choices must be a non-empty JSON list of strings")
    return choices


def _literal(text: str) -> str:
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(escapes.get(char, char) for char in text) + '"'
