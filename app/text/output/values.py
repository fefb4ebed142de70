"""A value between tags, which has no quotation marks: read by its schema."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping
from contextlib import suppress
from fractions import Fraction
from typing import Any, Final

from app.text.output.json_text import loads, valid
from app.text.output.schema_types import (
    BRANCHES,
    TYPES,
    alternatives,
    choices_of,
    is_of,
    kinds_of,
    resolved,
    types_of,
)
from app.text.output.source import Broken

_BLANKS: Final = " \t\r\n"
# As templates write them back.
CONSTANTS: Final = {"boolean": ("True", "False"), "null": ("None",)}


def _is_multiple(value: float, unit: float) -> bool:
    with suppress(ArithmeticError, ValueError):  # as they are written, and of any length
        return Fraction(repr(value)) % Fraction(repr(unit)) == 0
    return False


# Keywords of numbers, and whether a value is allowed.
_BOUNDS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "minimum": operator.ge,
    "exclusiveMinimum": operator.gt,
    "maximum": operator.le,
    "exclusiveMaximum": operator.lt,
    "multipleOf": _is_multiple,
}


def typed(schema: Any, text: str, root: Any = None) -> str:
    """A value's JSON text. A text that the schema lists is this text; else it is what it can be
    read as of the types that the schema declares, in their order, and a string at last. Where a
    string may stand, what is read so is of what the schema lists, and of its bounds.

    Without a declared type, valid JSON is taken as JSON. root: the schema that it is in."""
    as_text = _Checked(text, root)
    if as_text.is_listed(schema) and as_text.is_allowed(schema):
        return json.dumps(text)
    ones = [types_of(one, root) for one in alternatives(schema, root)]
    types = [kind for one in ones for kind in one] if all(ones) else []
    may_be_text = not types or "string" in types
    for kind in types or TYPES:
        with suppress(Broken):
            written = _read_as(kind, text)
            if not may_be_text or _Checked(json.loads(written), root).is_allowed(schema):
                return written
    return json.dumps(text)


class _Checked:
    """A value that is checked against schemas within `root`, each once. Of one that refers to
    itself the value is not."""

    def __init__(self, value: Any, root: Any) -> None:
        self._value = value
        self._root = root
        self._listed: dict[int, bool] = {}  # by the schema's identity
        self._allowed: dict[int, bool] = {}

    def is_listed(self, schema: Any) -> bool:
        """Whether one of the schema's parts lists the value, and allows its type."""
        found = self._listed.get(id(schema))
        if found is None:
            self._listed[id(schema)] = False
            found = self._listed[id(schema)] = self._lists(schema)
        return found

    def is_allowed(self, schema: Any) -> bool:
        """Whether the value is of the types that the schema declares, of the values that it lists,
        and within the bounds of numbers."""
        found = self._allowed.get(id(schema))
        if found is None:
            self._allowed[id(schema)] = False
            found = self._allowed[id(schema)] = self._allows(schema)
        return found

    def _lists(self, schema: Any) -> bool:
        schema = resolved(schema, self._root, set())
        if not isinstance(schema, Mapping):
            return False
        if any(_is_same(self._value, one) for one in choices_of(schema) or ()):
            return self._is_of(schema)
        branches = (schema[key] for key in BRANCHES if isinstance(schema.get(key), list))
        return any(self.is_listed(one) for ones in branches for one in ones)

    def _allows(self, schema: Any) -> bool:
        schema = resolved(schema, self._root, set())
        if not isinstance(schema, Mapping):
            return schema is not False
        choices = choices_of(schema)
        if choices is not None and not any(_is_same(self._value, one) for one in choices):
            return False
        if not self._is_of(schema) or not _is_within(schema, self._value):
            return False
        for key in BRANCHES:
            if isinstance(branches := schema.get(key), list):
                fit = map(self.is_allowed, branches)
                if not (all(fit) if key == "allOf" else any(fit)):
                    return False
        return True

    def _is_of(self, schema: Mapping[str, Any]) -> bool:
        kinds = kinds_of(schema)
        return not kinds or is_of(self._value, kinds)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are one of JSON, where true is not 1, unlike in Python."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    return isinstance(one, bool) is isinstance(other, bool) and bool(one == other)


def _is_within(schema: Mapping[str, Any], value: Any) -> bool:
    """Whether the value is within the schema's bounds of numbers."""
    return not _is_number(value) or all(
        is_kept(value, schema[key])
        for key, is_kept in _BOUNDS.items()
        if _is_number(schema.get(key))
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_as(kind: str, text: str) -> str:
    """The JSON text of a value of this type; raises Broken."""
    bare = text.strip(_BLANKS)
    if kind == "boolean" and bare.lower() in ("true", "false"):
        return bare.lower()
    if kind == "null" and bare in CONSTANTS["null"]:
        return "null"
    value = loads(text) if kind in TYPES else None
    if kind not in TYPES or not isinstance(value, TYPES[kind]):
        raise Broken
    if isinstance(value, bool) and kind != "boolean":
        raise Broken
    return valid(bare)


def is_json(text: str) -> bool:
    with suppress(Broken):
        loads(text)
        return True
    return False
