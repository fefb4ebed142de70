from __future__ import annotations

from typing import Any

import pytest

from actors.stage.grammars.json_schema import prepared

_INT: Any = {"type": "integer"}
_NAMES: Any = {"enum": ["x", "a.b"], "title": "Names"}


@pytest.mark.parametrize(
    ("schema", "rewritten"),
    [
        ({"properties": {"a": _INT}}, {"properties": {"a": _INT}, "additionalProperties": False}),
        ({"properties": {"a": _INT}, "additionalProperties": _INT}, None),
        ({"properties": {"a": _INT}, "patternProperties": {"b": _INT}}, None),
        ({"properties": {"a": _INT}, "required": ["b"]}, None),
        ({"allOf": [{"properties": {"a": _INT}}, {"properties": {"b": _INT}}]}, None),
        ({"$ref": "#/$defs/a", "properties": {"a": _INT}}, None),
        ({"type": "object"}, None),
        ({"properties": {"format": {"format": "iri"}, "uniqueItems": True}},
         {"properties": {"format": {}, "uniqueItems": True}, "additionalProperties": False}),
        ({"const": {"properties": {}}, "enum": [{"format": "iri"}]}, None),
        ({"prefixItems": [_INT]}, {"prefixItems": [_INT], "items": False}),
        ({"prefixItems": [_INT], "unevaluatedItems": _INT}, {"prefixItems": [_INT], "items": _INT}),
        ({"properties": {"a": _INT}, "unevaluatedProperties": _INT},
         {"properties": {"a": _INT}, "additionalProperties": _INT}),
        ({"$ref": "#/$defs/a", "unevaluatedProperties": False}, None),
        ({"format": "date", "uniqueItems": True}, None),
        ({"format": "iri", "uniqueItems": False}, {}),
        ({"propertyNames": _NAMES, "additionalProperties": _INT},
         {"patternProperties": {r"^(x|a\.b)$": _INT}, "additionalProperties": False}),
        ({"propertyNames": {"const": "x"}},
         {"patternProperties": {"^(x)$": True}, "additionalProperties": False}),
        ({"propertyNames": {"pattern": "x", "type": "string"}},
         {"patternProperties": {"x": True}, "additionalProperties": False}),
        ({"propertyNames": {"maxLength": 3}},
         {"patternProperties": {r"^[\s\S]{0,3}$": True}, "additionalProperties": False}),
        ({"propertyNames": {"pattern": "x", "maxLength": 3}}, None),
        ({"propertyNames": _NAMES, "properties": {"x": _INT}}, None),
        ({"propertyNames": {"$ref": "#/$defs/nowhere"}}, None),
        ({"$schema": "http://example.com/own"}, {}),
        ({"$schema": "http://json-schema.org/draft-07/schema#"}, None),
        ({"pattern": "^(?!a)"}, None),
        ({"maximum": 1.7e308, "minimum": -2.5}, {"minimum": -2.5}),
        ({"maximum": 2**63}, None),
        (True, None),
        ([_INT], None),
    ],
)  # fmt: skip
def test_schemas_are_rewritten(schema: Any, rewritten: Any) -> None:
    assert prepared(schema) == (schema if rewritten is None else rewritten)


@pytest.mark.parametrize("pattern", ["^(?!a)b", "(?<=a)b", "(?=b)"])
def test_a_pattern_that_looks_around_is_left_out_where_that_is_allowed(pattern: str) -> None:
    assert prepared({"items": {"pattern": pattern}}, is_strict=False) == {"items": {}}


@pytest.mark.parametrize("pattern", [r"\(?!a", "[(?=]", "(?:a)", "(?<n>a)"])
def test_other_patterns_are_kept(pattern: str) -> None:
    assert prepared({"pattern": pattern}, is_strict=False) == {"pattern": pattern}


def test_names_may_be_a_reference() -> None:
    schema = {"$defs": {"a/b": _NAMES}, "items": {"propertyNames": {"$ref": "#/$defs/a~1b"}}}
    closed = {"patternProperties": {r"^(x|a\.b)$": True}, "additionalProperties": False}
    assert prepared(schema)["items"] == closed
