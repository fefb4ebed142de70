"""Types of values, through references, alternatives and lists of values."""

from __future__ import annotations

from typing import Any

import pytest

from app.text.output.schema_types import alone, alternatives, resolved, types_of

ROOT: dict[str, Any] = {
    "$defs": {
        "digit": {"enum": [1, "2", None]},
        "a/b": {"$ref": "#/$defs/digit"},
        "loop": {"$ref": "#/$defs/loop"},
    }
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({}, []),
        (True, []),
        ({"type": ["integer", 3]}, ["integer"]),
        ({"const": 1.5}, ["number"]),
        ({"properties": {}}, ["object"]),
        ({"items": {}}, ["array"]),
        ({"items": {}, "enum": [1]}, ["integer"]),
        ({"anyOf": [{"items": {}}, {"type": "null"}]}, ["array", "null"]),
        ({"$ref": "#/$defs/a~1b"}, ["integer", "string", "null"]),
        ({"$ref": "#/$defs/loop"}, []),
        ({"$ref": "#/$defs/none"}, []),
        ({"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/digit"}]},
         ["boolean", "integer", "string", "null"]),
    ],
)  # fmt: skip
def test_types_are_those_declared_or_of_the_values_listed(schema: Any, types: list[str]) -> None:
    assert types_of(schema, ROOT) == types


def test_alternatives_are_of_one_type_each() -> None:
    schema = {"anyOf": [{"type": ["string", "null"]}, {"$ref": "#/$defs/a~1b"}], "title": "x"}
    found = list(alternatives(schema, ROOT))
    assert found == [{"type": "string"}, {"type": "null"}, ROOT["$defs"]["digit"]]


def test_a_schema_alone_holds_what_it_refers_to() -> None:
    moved = alone({"items": {"$ref": "#/$defs/digit"}}, ROOT)
    assert '"#/$defs/whole/$defs/digit"' in moved
    assert alone({"items": {}}, ROOT) == '{"items": {}}'


def test_what_stands_beside_a_reference_counts() -> None:
    found = resolved({"$ref": "#/$defs/digit", "title": "x"}, ROOT, set())
    assert found == {"enum": [1, "2", None], "title": "x"}
