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
        ({"maximum": 2**63, "minimum": -(2**53)}, None),
        ({"maximum": 2**63 - 1, "minimum": -(2**63)}, {"maximum": 2**63 - 1}),
        ({"$schema": "https://json-schema.org/draft-07/schema#"}, {}),
        ({"$schema": "https://json-schema.org/draft/2020-12/schema"}, None),
        ({"$ref": "#/$defs/Response<\u732b>[a b]"},
         {"$ref": "#/$defs/Response%3C%E7%8C%AB%3E%5Ba%20b%5D"}),
        ({"$ref": "#/$defs/a~1b%20c"}, None),
        ({"propertyNames": {"type": "string"}, "properties": {}},
         {"properties": {}, "additionalProperties": False}),
        ({"propertyNames": True, "additionalProperties": _INT}, {"additionalProperties": _INT}),
        ({"propertyNames": {"pattern": "x", "format": "uuid"}},
         {"patternProperties": {"x": True}, "additionalProperties": False}),
        ({"properties": {"a": _INT}, "required": ["a"], "minProperties": 2,
          "additionalProperties": _INT}, None),
        ({"items": {"pattern": "[[]"}}, {"items": {"pattern": r"[\[]"}}),
        (True, None),
        ([_INT], None),
    ],
)  # fmt: skip
def test_schemas_are_rewritten(schema: Any, rewritten: Any) -> None:
    assert prepared(schema) == (schema if rewritten is None else rewritten)


def test_only_joined_schemas_are_left_open() -> None:
    """With what they refer to; names of properties are no words of schemas."""
    one: Any = {"properties": {"a": {"properties": {}}}}
    closed = {"properties": {"a": {"properties": {}, "additionalProperties": False}}}
    schema: Any = {
        "$defs": {"used": one, "other": one.copy()},
        "properties": {
            "allOf": {"allOf": [{"$ref": "#/$defs/used"}, {"properties": {}}]},
            "anyOf": {"type": "string"},
            "properties": {"type": "object"},
            "other": {"$ref": "#/$defs/other"},
        },
    }
    schema["$defs"]["other"]["properties"] = {"a": {"properties": {}}}
    found = prepared(schema)
    assert found["additionalProperties"] is False
    assert found["$defs"] == {"used": one, "other": {**closed, "additionalProperties": False}}
    assert found["properties"]["allOf"] == schema["properties"]["allOf"]


@pytest.mark.parametrize("key", ["minProperties", "maxProperties"])
def test_counts_beside_optional_properties_are_left_out_or_refused(key: str) -> None:
    schema = {"properties": {"a": _INT}, "additionalProperties": True, key: 2}
    assert prepared(schema, is_strict=False) == {k: v for k, v in schema.items() if k != key}
    with pytest.raises(ValueError, match=key):
        prepared(schema)
    assert prepared({**schema, key: 1})[key] == 1


def test_another_document_is_anything_where_that_is_allowed() -> None:
    schema = {"items": {"$ref": "other.json#/x"}}
    assert prepared(schema) == schema
    assert prepared(schema, is_strict=False) == {"items": {}}
    named = {"$id": "urn:x", "items": {"$ref": "urn:x#/$defs/a"}}
    assert prepared(named, is_strict=False) == named


def test_patterns_that_cannot_be_kept_are_left_out_where_that_is_allowed() -> None:
    schema = {
        "items": {"pattern": "x("},
        "patternProperties": {"^(?!a)": _INT, "x(": _INT, "y": _INT},
        "additionalProperties": False,
    }
    kept = {"items": {}, "patternProperties": {"y": _INT}, "additionalProperties": True}
    assert prepared(schema, is_strict=False, is_pattern=lambda pattern: "(" not in pattern) == kept
    one = {"patternProperties": {"^(?!a)": _INT}, "additionalProperties": False}
    assert prepared(one, is_strict=False) == {"patternProperties": {}, "additionalProperties": _INT}


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
