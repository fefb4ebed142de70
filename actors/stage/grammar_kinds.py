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


def compile_grammar(compiler: Any, kind: str, text: str) -> Any:
    """Compile a grammar's kind and text; raises what xgrammar raises, ValueError among them."""
    match kind:
        case "json_object":
            return compiler.compile_json_schema(_ANY_OBJECT, **_LAYOUT)
        case "json_schema":
            schema = json.dumps(bounds_as_patterns(json.loads(text)), ensure_ascii=False)
            return compiler.compile_json_schema(schema, **_LAYOUT)
        case "regex":
            return compiler.compile_regex(text)
        case "ebnf":
            return compiler.compile_grammar(text)
        case "choice":
            return compiler.compile_grammar(ebnf_of_choices(_choices(text)))
    raise ValueError(f"grammar kind {kind!r} is unknown")


def bounds_as_patterns(schema: Any) -> Any:
    """The schema with minLength and maxLength of strings written as patterns.

    xgrammar (0.2.8; its issue 800) allows raw control characters in strings with such bounds, which
    is not JSON; strings with a pattern are right.
    """
    if isinstance(schema, list):
        return [bounds_as_patterns(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    changed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED_SCHEMAS and isinstance(value, dict):
            changed[key] = {name: bounds_as_patterns(one) for name, one in value.items()}
        else:
            changed[key] = value if key in _VALUES else bounds_as_patterns(value)
    has_form = "pattern" in schema or str(schema.get("format")) in FORMATS
    pattern = None if has_form else _pattern_of_bounds(schema)
    if pattern is not None:
        changed.pop("minLength", None)
        changed.pop("maxLength", None)
        changed["pattern"] = pattern
    return changed


def _pattern_of_bounds(schema: dict[str, Any]) -> str | None:
    """A pattern for a string schema's bounds; None where it has none, or invalid ones."""
    if "string" not in (schema.get("type"), *_listed(schema.get("type"))):
        return None
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    if type(low) is not int or low < 0:
        return None
    if high is None:
        return f"^{_CHAR}{{{low},}}$" if low else None
    if type(high) is not int or high < low:
        return None
    return f"^{_CHAR}{{{low},{high}}}$"


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
