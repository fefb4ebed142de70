"""Values between tags, which have no quotation marks, as their schemas have them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.text.output.values import typed

NULL, TEXT, INTEGER = ({"type": kind} for kind in ("null", "string", "integer"))


def test_without_a_type_json_is_json() -> None:
    assert [typed({}, text) for text in ("1", "[1]", "x")] == ["1", "[1]", '"x"']


def test_constants_of_python_are_read_as_templates_write_them_back() -> None:
    assert typed({"type": "boolean"}, "True") == "true"
    for schema in (NULL, {"type": ["integer", "null"]}, {"anyOf": [TEXT, NULL]}, {}):
        assert typed(schema, " None\n") == "null"
        assert typed(schema, "none") == '"none"'
    assert typed(TEXT, "None") == '"None"'
    listed = {"enum": ["None", None]}
    assert typed(listed, "None") == '"None"'
    assert typed({"anyOf": [{"const": "None"}, NULL]}, "None") == '"None"'
    root = {"$defs": {"Mode": listed}}
    assert typed({"anyOf": [{"$ref": "#/$defs/Mode"}, NULL]}, "None", root) == '"None"'
    assert typed({"$ref": "#/$defs/Mode"}, "None", root) == '"None"'


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"enum": ["1", 2, "a"]}, {"1": "1", "2": 2, "3": "3", "a": "a", "b": "b"}),
        ({"enum": ["true", False, None]}, {"true": "true", "false": False, "null": None}),
        ({"enum": ["[1]", [2]]}, {"[1]": "[1]", "[2]": [2], "[3]": "[3]"}),
        ({"type": ["string", "integer"], "enum": ["1", 2]}, {"1": "1", "2": 2, "2.0": "2.0"}),
        ({"anyOf": [{"enum": [1, 2]}, TEXT]}, {"1": 1, "3": "3", "True": "True"}),
        ({"anyOf": [{"const": 1}, {"const": True}, TEXT]}, {"1": 1, "true": True, "0": "0"}),
        ({"anyOf": [{"enum": ["7", "x"]}, INTEGER]}, {"7": "7", "8": 8, "x": "x"}),
        ({"anyOf": [TEXT, INTEGER]}, {"7": 7, "007": "007", "7.5": "7.5", "true": "true"}),
        ({"type": ["string", "null"]}, {"null": None, "None": None, "nil": "nil"}),
        ({"type": ["boolean", "number"]}, {"1": 1, "1.5": 1.5, "FALSE": False, "null": "null"}),
        ({"type": ["string", "number"], "minimum": 2}, {"1.5": "1.5", "2": 2, "-7": "-7"}),
        (
            {"anyOf": [{"type": "integer", "exclusiveMinimum": 2, "multipleOf": 2}, TEXT]},
            {"2": "2", "4": 4, "5": "5"},
        ),
        (
            {"anyOf": [{"maximum": 1, "type": "number"}, {"const": 5}, TEXT]},
            {"1": 1, "2": "2", "5": 5},
        ),
        ({"type": ["string", "integer"], "multipleOf": 0.5}, {"9" * 400: int("9" * 400), "2": 2}),
        ({"type": ["string", "integer"], "multipleOf": 7}, {"7" * 40: int("7" * 40), "8": "8"}),
        ({"type": "integer", "minimum": 5}, {"3": 3}),
        ({"type": ["string", "number"], "multipleOf": 0.01}, {"19.99": 19.99, "0.005": "0.005"}),
        ({"enum": [1, 2]}, {"3": 3, "x": "x"}),  # as no text may stand there
        ({"type": "integer", "enum": ["1", 1]}, {"1": 1}),
        ({"enum": [[1], {"k": [0]}, "x"]}, {"[1]": [1], "[true]": "[true]", "[1.0]": [1.0]}),
        ({"enum": [[True], {"k": [0]}, "x"]}, {"[1]": "[1]", "[true]": [True]}),
        ({"enum": [{"k": 1}, "x"]}, {'{"k": true}': '{"k": true}', '{"k": 1.0}': {"k": 1.0}}),
        ({"enum": [{"k": 1}, "x"]}, {'{"k": 1, "l": 2}': '{"k": 1, "l": 2}', "{}": "{}"}),
        ({"anyOf": [{"const": 1}, TEXT]}, {"true": "true", "1.0": "1.0", "1": 1}),
        ({"anyOf": [{"type": "number", "const": 1}, TEXT]}, {"1.0": 1.0}),
        ({"allOf": [{"enum": ["1", 2, "3"]}, {"title": "x"}]}, {"1": "1", "2": 2, "4": "4"}),
        ({"allOf": [{"enum": ["1", 2]}, {"enum": [2, 1, "3"]}]}, {"1": "1", "2": 2, "3": "3"}),
        ({"allOf": [TEXT, {"enum": ["1", 1]}]}, {"1": "1"}),
        ({"allOf": [INTEGER, {"enum": ["1", 1]}]}, {"1": 1}),
        ({"allOf": [{"enum": ["1", 2]}], "title": "x", "minLength": 1}, {"1": "1", "2": 2}),
        (
            {"allOf": [{"anyOf": [{"const": "5"}, INTEGER, TEXT]}, {"maximum": 9}]},
            {"5": "5", "7": 7, "10": "10"},
        ),
        ({"minimum": 5}, {"3": "3", "7": 7, "true": True, "x": "x", "[3]": [3]}),
        ({"multipleOf": 5, "enum": ["10", 10, 15]}, {"10": "10", "15": 15, "20": "20"}),
    ],
)
def test_a_value_of_several_types_is_of_the_listed_ones_and_a_text_at_last(
    schema: Any, values: dict[str, Any]
) -> None:
    read = {text: json.loads(typed(schema, text)) for text in values}
    assert read == values
    assert [*map(type, read.values())] == [*map(type, values.values())]


def test_what_a_schema_refers_to_is_looked_at_once() -> None:
    """Each of these twice, they are more than can be looked at."""
    twice = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)}
    schema = {"anyOf": [TEXT, {"$ref": "#/$defs/d0"}]}
    ends = {"d60": {"enum": ["1", 2]}}, {"d60": {"allOf": [{"minimum": 5}, {"$ref": "#/$defs/d0"}]}}
    listed, loop = ({"$defs": {**twice, **end}} for end in ends)
    assert [typed(schema, text, listed) for text in ("1", "2", "3")] == ['"1"', "2", '"3"']
    assert typed(schema, "7", loop) == '"7"'
