"""Rewrites a JSON schema in the words that llguidance knows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

FORMATS: Final = frozenset(
    {"date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
_NAMED_SCHEMAS: Final = frozenset(
    {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
)
_VALUES: Final = frozenset({"const", "enum", "default", "examples"})
_WHOLE: Final = frozenset({"$ref", "anyOf", "oneOf", "allOf"})
_OF_OBJECTS: Final = frozenset({"properties", "required", "patternProperties"})
_BOUNDS: Final = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_FAR: Final = 1e18
_DRAFT: Final = re.compile(r"https?://json-schema\.org/")
_CLASS: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\Z)", re.DOTALL)  # or an escape
_LOOKAROUND: Final = re.compile(r"\(\?<?[=!]")
_OPEN: Final = frozenset({"additionalProperties", "patternProperties", "propertyNames"})


def prepared(schema: Any, is_strict: bool = True) -> Any:
    """The same schema, with these differences.

    An object has the declared properties alone, and a tuple the declared items, unless the schema
    speaks of others: models would add some. A schema that joins objects by `allOf` or beside a
    reference is left open, as each of them has to allow what the others declare. A format that is
    not of `FORMATS` is a remark, as is a bound of numbers near the largest float, and a `$schema`
    of one's own. A pattern that looks around, which has no automaton, is left out unless is_strict.
    Other words are written in those known.
    """
    return _Rewriting(schema, not _joins(schema), is_strict).of(schema)


def _joins(schema: Any) -> bool:
    """Whether somewhere several schemas hold for one object."""
    if isinstance(schema, list):
        return any(map(_joins, schema))
    if not isinstance(schema, dict):
        return False
    several = schema.get("allOf")
    if isinstance(several, list) and len(several) > 1:
        return True
    if not (_OF_OBJECTS.isdisjoint(schema) or _WHOLE.isdisjoint(schema)):
        return True
    return any(_joins(value) for key, value in schema.items() if key not in _VALUES)


@dataclass(frozen=True, slots=True)
class _Rewriting:
    root: Any
    closes: bool
    is_strict: bool

    def of(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self.of(one) for one in schema]
        if not isinstance(schema, dict):
            return schema
        changed: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _NAMED_SCHEMAS and isinstance(value, dict):
                changed[key] = {name: self.of(one) for name, one in value.items()}
            elif key in _VALUES:
                changed[key] = value
            elif not self._is_remark(key, value):
                changed[key] = self.of(value)
        if _WHOLE.isdisjoint(changed):
            _rename(changed, "unevaluatedProperties", "additionalProperties")
            _rename(changed, "unevaluatedItems", "items")
        _write_names_as_pattern(changed, self.root)
        if self.closes:
            _close(changed)
        return changed

    def _is_remark(self, key: str, value: Any) -> bool:
        match key:
            case "format":
                return value not in FORMATS
            case "uniqueItems":
                return not value
            case "$schema":
                return _DRAFT.match(str(value)) is None
            case "pattern" if not self.is_strict and isinstance(value, str):
                return _LOOKAROUND.search(_CLASS.sub("", value)) is not None
            case _ if key in _BOUNDS and isinstance(value, float):
                return abs(value) >= _FAR
        return False


def _rename(schema: dict[str, Any], key: str, known: str) -> None:
    if key in schema and known not in schema:
        schema[known] = schema.pop(key)


def _write_names_as_pattern(schema: dict[str, Any], root: Any) -> None:
    """`propertyNames` as patternProperties, where it is the whole rule for names."""
    if "propertyNames" in schema and not {"properties", "patternProperties"} & schema.keys():
        pattern = _pattern_of_names(_resolved(schema["propertyNames"], root))
        if pattern is not None:
            del schema["propertyNames"]
            schema["patternProperties"] = {pattern: schema.get("additionalProperties", True)}
            schema["additionalProperties"] = False


def _resolved(schema: Any, root: Any) -> Any:
    """What a schema that is only a reference within the whole one refers to."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    found = root
    for part in reference[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _pattern_of_names(names: Any) -> str | None:
    """None where these names are no single pattern."""
    if not isinstance(names, Mapping):
        return None
    rules = {key: names[key] for key in names if key not in {"type", "title", "description"}}
    if "const" in rules:
        rules["enum"] = [rules.pop("const")]
    match rules:
        case {"enum": [*choices], **rest} if not rest and all(isinstance(c, str) for c in choices):
            return f"^({'|'.join(map(re.escape, choices))})$"
        case {"pattern": str(pattern), **rest} if not rest:
            return pattern
        case {**bounds} if bounds and bounds.keys() <= {"minLength", "maxLength"}:
            return f"^[\\s\\S]{{{bounds.get('minLength', 0)},{bounds.get('maxLength', '')}}}$"
    return None


def _close(schema: dict[str, Any]) -> None:
    declared, required = schema.get("properties"), schema.get("required", [])
    match declared, required:
        case dict(), list() if _OPEN.isdisjoint(schema) and declared.keys() >= {*required}:
            schema["additionalProperties"] = False
    if "prefixItems" in schema and "items" not in schema:
        schema["items"] = False
