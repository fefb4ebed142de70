"""A value between tags, which has no quotation marks: read by its schema."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any, Final

from app.text.output.json_text import loads, valid
from app.text.output.schema_types import (
    TYPES,
    alternatives,
    choices_of,
    is_of,
    types_of,
)
from app.text.output.source import Broken

_BLANKS: Final = " \t\r\n"
# As templates write them back.
CONSTANTS: Final = {"boolean": ("True", "False"), "null": ("None",)}


def _is_multiple(value: float, unit: float) -> bool:
    with suppress(ArithmeticError):
        return Decimal(repr(value)) % Decimal(repr(unit)) == 0
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
    ones = [(types_of(one, root), one) for one in alternatives(schema, root)]
    if any(is_of(text, kinds) and text in (choices_of(one) or ()) for kinds, one in ones):
        return json.dumps(text)
    types = types_of(schema, root)
    for kind in types or TYPES:
        with suppress(Broken):
            written = _read_as(kind, text)
            if "string" not in types or _is_allowed(json.loads(written), ones):
                return written
    return json.dumps(text)


def _is_allowed(value: Any, ones: list[tuple[list[str], Mapping[str, Any]]]) -> bool:
    """Whether one of these schemas, with its types, has the value, or none is of its type."""
    own = [schema for kinds, schema in ones if not kinds or is_of(value, kinds)]
    return not own or any(_has(schema, value) for schema in own)


def _has(schema: Mapping[str, Any], value: Any) -> bool:
    choices = choices_of(schema)
    if choices is not None and value not in choices:
        return False
    if not _is_number(value):
        return True
    return all(
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
