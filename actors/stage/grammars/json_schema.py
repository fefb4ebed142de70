"""Rewrites a JSON schema in the words that llguidance knows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, unquote

from actors.stage.grammars.patterns import as_rust, looks_around

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
_DRAFTS: Final = {
    *(f"http://json-schema.org/draft-0{number}/schema" for number in (4, 6, 7)),
    *(f"https://json-schema.org/draft/{name}/schema" for name in ("2019-09", "2020-12")),
}
_IN_REFERENCES: Final = "/#%~!$&'()*+,;=:@?"
_SAYS_NOTHING: Final = frozenset({"type", "title", "description"})  # of names
_OPEN: Final = frozenset({"additionalProperties", "patternProperties", "propertyNames"})


def prepared(
    schema: Any, is_strict: bool = True, is_pattern: Callable[[str], bool] | None = None
) -> Any:
    """The same schema, with these differences.

    An object has the declared properties alone, and a tuple the declared items, unless the schema
    speaks of others: models would add some. Schemas that are joined, by `allOf` or beside a
    reference or alternatives, are left open, as each of them has to allow what the others declare.
    A format that is not of `FORMATS` is a remark, as are a bound of numbers near the largest float
    and a `$schema` that is no draft's. Other words are written in those known.

    Unless is_strict, what cannot be kept is left out: patterns that look around or that
    `is_pattern` denies, references to other documents, and bounds of the number of properties
    beside optional ones. Raises ValueError for the last where it is strict.
    """
    return _Rewriting(schema, is_strict, is_pattern, _joined(schema)).of(schema)


def _joined(root: Any) -> set[int]:
    """Ids of the schemas below one that several schemas hold for."""
    found: set[int] = set()

    def add(schema: Any) -> None:
        if id(schema) in found:
            return
        if isinstance(schema, dict):
            found.add(id(schema))
            add(resolved(schema, root))
        for inner in _inner(schema):
            add(inner)

    def search(schema: Any) -> None:
        if isinstance(schema, dict):
            several = schema.get("allOf")
            is_beside = not (_OF_OBJECTS.isdisjoint(schema) or _WHOLE.isdisjoint(schema))
            if is_beside or (isinstance(several, list) and len(several) > 1):
                add(schema)
        for inner in _inner(schema):
            search(inner)

    search(root)
    return found


def _inner(schema: Any) -> Iterator[Any]:
    if isinstance(schema, list):
        yield from schema
    elif isinstance(schema, dict):
        for key, value in schema.items():
            if key in _NAMED_SCHEMAS and isinstance(value, dict):
                yield from value.values()
            elif key not in _VALUES:
                yield value


@dataclass(frozen=True, slots=True)
class _Rewriting:
    """joined: ids of the schemas that are left open."""

    root: Any
    is_strict: bool
    is_pattern: Callable[[str], bool] | None
    joined: set[int]

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
            elif key == "pattern" and isinstance(value, str):
                if not self._is_lost(value):
                    changed[key] = as_rust(value)
            elif key == "$ref" and isinstance(value, str):
                if self.is_strict or value.startswith("#") or "$id" in self.root:
                    changed[key] = quote(value, safe=_IN_REFERENCES)
            elif not _is_remark(key, value):
                changed[key] = self.of(value)
        if _WHOLE.isdisjoint(changed):
            _rename(changed, "unevaluatedProperties", "additionalProperties")
            _rename(changed, "unevaluatedItems", "items")
        self._write_names(changed)
        self._write_patterns_of_names(changed)
        self._check_counts(changed)
        if id(schema) not in self.joined:
            _close(changed)
        return changed

    def _is_lost(self, pattern: str) -> bool:
        if self.is_strict:
            return False
        is_pattern = self.is_pattern is None or self.is_pattern(as_rust(pattern))
        return looks_around(pattern) or not is_pattern

    def _write_names(self, schema: dict[str, Any]) -> None:
        """`propertyNames` as patternProperties, where it is the whole rule for names."""
        if "propertyNames" not in schema:
            return
        names = resolved(schema["propertyNames"], self.root)
        if names is True or (isinstance(names, dict) and names.keys() <= _SAYS_NOTHING):
            del schema["propertyNames"]
        elif not {"properties", "patternProperties"} & schema.keys():
            pattern = _pattern_of_names(names)
            if pattern is not None:
                del schema["propertyNames"]
                schema["patternProperties"] = {pattern: schema.get("additionalProperties", True)}
                schema["additionalProperties"] = False

    def _write_patterns_of_names(self, schema: dict[str, Any]) -> None:
        patterns = schema.get("patternProperties")
        if not isinstance(patterns, dict):
            return
        kept = {as_rust(name): value for name, value in patterns.items() if not self._is_lost(name)}
        lost = [value for name, value in patterns.items() if self._is_lost(name)]
        schema["patternProperties"] = kept
        if lost and not schema.get("additionalProperties"):
            schema["additionalProperties"] = lost[0] if len(lost) == 1 else True

    def _check_counts(self, schema: dict[str, Any]) -> None:
        """llguidance counts undeclared properties only."""
        declared, required = schema.get("properties"), schema.get("required", [])
        if not isinstance(declared, dict) or not isinstance(required, list):
            return
        if declared.keys() <= {*required}:
            return
        for key in ("minProperties", "maxProperties"):
            if isinstance(count := schema.get(key), int) and count > 1:
                if self.is_strict:
                    raise ValueError(f"{key} beside properties that are not required")
                del schema[key]


def _is_remark(key: str, value: Any) -> bool:
    match key:
        case "format":
            return value not in FORMATS
        case "uniqueItems":
            return not value
        case "$schema":
            return str(value).removesuffix("#") not in _DRAFTS
        case _ if key in _BOUNDS and isinstance(value, int | float):
            return value <= -_FAR or (isinstance(value, float) and value >= _FAR)
    return False


def _rename(schema: dict[str, Any], key: str, known: str) -> None:
    if key in schema and known not in schema:
        schema[known] = schema.pop(key)


def resolved(schema: Any, root: Any) -> Any:
    """What a schema that is only a reference within the whole one refers to."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    found = root
    for part in reference[2:].split("/"):
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _pattern_of_names(names: Any) -> str | None:
    """None where these names are no single pattern."""
    if not isinstance(names, Mapping):
        return None
    rules = {key: names[key] for key in names if key not in _SAYS_NOTHING}
    if "pattern" in rules:
        rules.pop("format", None)  # which describes the same
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
