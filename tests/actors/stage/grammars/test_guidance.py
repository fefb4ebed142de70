"""What llguidance keeps of schemas, patterns and choices, token by token of single bytes."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from actors.stage.grammars import guidance
from actors.stage.grammars.guidance import _LIMITS, GuidanceCompiler
from actors.stage.grammars.json_schema import FORMATS
from actors.stage.grammars.matcher import Matcher

END = 256
COMPILER = GuidanceCompiler([bytes([byte]) for byte in range(256)] + [b""], (END,))


def new(kind: str, text: str) -> Matcher:
    return COMPILER.compile(kind, text)()


def of_schema(schema: Any, is_strict: bool = True) -> Matcher:
    return new("strict_json_schema" if is_strict else "json_schema", json.dumps(schema))


def takes(matcher: Matcher, text: str) -> bool:
    return all(map(matcher.take, text.encode())) and (matcher.is_over or matcher.take(END))


def takes_value(matcher: Matcher, value: Any) -> bool:
    return takes(matcher, json.dumps(value, ensure_ascii=False))


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


_INT: Any = {"type": "integer"}
_TEXT: Any = {"type": "string"}
# A schema, a value that breaks it, and what of it is refused where it is strict; None: nothing is,
# since the value cannot be written.
_BROKEN: list[tuple[Any, Any, str | None]] = [
    (_TEXT | {"pattern": "^(?!b)[ab]$"}, "b", "look-around"),
    (_TEXT | {"pattern": "^[(?=]$"}, "x", None),
    (_TEXT | {"pattern": r"^\(?!a$"}, "x", None),
    (_TEXT | {"pattern": "^a+$", "maxLength": 1}, "aa", None),
    (_TEXT | {"pattern": "^a+$", "minLength": 2}, "a", None),
    (_TEXT | {"pattern": "^a+$", "minLength": 0}, "b", None),
    (_TEXT | {"format": "date", "maxLength": 3}, "2026-01-01", "Unsatisfiable"),
    (_TEXT | {"format": "date", "pattern": "^a$"}, "2026-01-01", "Unsatisfiable"),
    (_TEXT | {"format": "date", "pattern": "^2"}, "1999-01-01", None),
    (_TEXT | {"maxLength": 2000}, "a" * 2001, None),
    (_TEXT | {"pattern": "b"}, "aca", None),
    (_TEXT | {"format": "uri", "minLength": 1}, "", None),
    (_TEXT | {"format": "uri", "minLength": 1, "maxLength": 2083}, "", None),  # HttpUrl
    (_TEXT | {"format": "uri-reference", "minLength": 1}, "", None),
    (_TEXT | {"format": "password", "maxLength": 3}, "abcd", None),
    (_TEXT | {"format": "password", "pattern": "^a$"}, "b", None),
    (_TEXT | {"minLength": 2, "maxLength": 3}, "a", None),
    ({"type": ["string", "null"], "maxLength": 1}, "ab", None),
    ({"maxLength": 1}, "ab", None),
    (_INT | {"multipleOf": 5}, 7, None),
    (_INT | {"multipleOf": 1024}, 7, None),
    ({"type": ["integer", "null"], "multipleOf": 5}, 7, None),
    (_INT | {"multipleOf": 2000}, 7, None),
    (_INT | {"multipleOf": 5, "minimum": 0}, 7, None),
    ({"type": "number", "multipleOf": 0.5}, 0.7, None),
    ({"type": "number", "minimum": 0.5, "exclusiveMaximum": 2}, 2, None),
    (_INT | {"exclusiveMinimum": 0, "maximum": 7}, 8, None),
    ({"minimum": 3}, 2, None),
    ({"type": "array", "items": _INT, "minItems": 2}, [1], None),
    ({"type": "array", "items": _INT, "uniqueItems": True}, [1, 1], "uniqueItems"),
    ({"type": "array", "items": _INT, "uniqueItems": False}, ["a"], None),
    ({"type": "array", "items": _INT, "contains": {"const": 1}}, [2], "contains"),
    ({"type": "array", "prefixItems": [_INT], "items": False}, [1, 2], None),
    ({"items": _INT}, ["a"], None),
    (_object(a=_INT) | {"required": ["a"]}, {}, None),
    ({"properties": {"a": _INT}, "required": ["a"]}, {"a": "b"}, None),
    (_object(a=_INT, b=_INT) | {"minProperties": 1}, {}, None),
    ({"type": "object", "additionalProperties": _INT, "maxProperties": 1}, {"a": 1, "b": 2}, None),
    ({"type": "object", "patternProperties": {"^a$": _INT}, "required": ["a"]}, {}, None),
    (
        {"type": "object", "patternProperties": {"^(?!b).$": _INT}, "additionalProperties": False},
        {"b": 1},
        "look-around",
    ),
    (
        {"type": "object", "propertyNames": {"maxLength": 1}, "additionalProperties": _INT},
        {"ab": 1},
        None,
    ),
    (
        {"type": "object", "properties": {"b": _INT}, "propertyNames": {"pattern": "^a$"}},
        {"b": 1},
        "propertyNames",
    ),
    (
        _object(a=_INT, b=_INT) | {"dependentRequired": {"a": ["b"]}},
        {"a": 1},
        "dependentRequired",
    ),
    (_object(a=_INT, b=_INT) | {"if": {"required": ["a"]}, "then": False}, {"a": 1}, '"if"'),
    (_object(a={"not": {"const": 1}}), {"a": 1}, '"not"'),
    ({"anyOf": [_INT | {"minimum": 3}, _TEXT]}, 2, None),
    ({"anyOf": [_INT, _TEXT], "minimum": 3}, 2, None),
    ({"type": "integer", "anyOf": [{"const": 1}, _INT]}, "a", None),
    ({"type": "string", "anyOf": [{"title": "any"}]}, 1, None),
    ({"allOf": [_INT | {"minimum": 3}]}, 2, None),
    ({"allOf": [_INT, {"minimum": 3}]}, 2, None),
    ({"oneOf": [_object(k={"const": c}) | {"required": ["k"]} for c in "ab"]}, {"k": "c"}, None),
    ({"type": "string", "enum": ["a", "bc"]}, "b", None),
    ({"type": "string", "enum": ["a", "bc"], "maxLength": 1}, "bc", None),
    ({"$defs": {"i": _INT}, "$ref": "#/$defs/i", "title": "I"}, "a", None),
    ({"$defs": {"i": _INT}, "$ref": "#/$defs/i", "minimum": 3}, 2, None),
    ({"$defs": {"i": _INT | {"$anchor": "x"}}, "$ref": "#x"}, "a", None),
    (
        {"$defs": {"i": {"type": "number", "multipleOf": 0.5}}, "items": {"$ref": "#/$defs/i"}},
        [0.7],
        None,
    ),
]


@pytest.mark.parametrize(("schema", "value", "refused"), _BROKEN)
def test_a_strict_schema_is_kept_or_refused(schema: Any, value: Any, refused: str | None) -> None:
    assert not Draft202012Validator(schema).is_valid(value)
    if refused is None:
        assert not takes_value(of_schema(schema), value)
        assert not takes_value(of_schema(schema, is_strict=False), value)
    else:
        with pytest.raises(ValueError, match=refused) as bad:
            of_schema(schema)
        assert "\n" not in str(bad.value)
        if refused != "Unsatisfiable" and "patternProperties" not in schema:
            assert takes_value(of_schema(schema, is_strict=False), value)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (_object(a=_INT, b=_TEXT), {}),
        (_object(a=_INT, b=_TEXT), {"a": 1, "b": "é\n\u2028猫"}),
        ({"allOf": [_object(a=_INT) | {"additionalProperties": True}, {"required": ["b"]}]},
         {"a": 1, "b": [1.5e3, None]}),
        (_TEXT | {"maxLength": 2000}, "a" * 2000),
        (_TEXT | {"pattern": "b"}, "abc"),
        (_TEXT | {"format": "uuid"}, "123e4567-e89b-12d3-a456-426614174000"),
        (_TEXT | {"format": "password"}, "a b%("),
        ({"type": "array", "items": _INT, "uniqueItems": False}, [1, 1]),
        ({"type": "object", "propertyNames": {"enum": ["a.b", "c"]}}, {"c": 1, "a.b": {}}),
        ({"type": "number", "multipleOf": 0.25}, 1.75),
        ({"$defs": {"A<b> \u732b": _INT}, "$ref": "#/$defs/A<b> \u732b"}, 1),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, -(2**63)),
        ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": _INT},
         {"a": 1}),
        (_TEXT | {"pattern": r"^[^<>()[\]\.,;:\s@\"]+$"}, "ab"),
        ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1e38}, -2.5),
        (True, {"any": ["thing"]}),
        ({}, "any"),
    ],
)  # fmt: skip
def test_what_a_schema_allows_can_be_written(schema: Any, value: Any) -> None:
    assert Draft202012Validator(schema).is_valid(value)
    assert takes_value(of_schema(schema), value)


def test_a_pattern_that_is_none_is_left_out_where_that_is_allowed() -> None:
    schema = {"items": _TEXT | {"pattern": r"\ud83d[\udc00-\udfff]"}, "type": "array"}
    assert takes_value(of_schema(schema, is_strict=False), ["x"])
    with pytest.raises(ValueError, match="hex"):
        of_schema(schema)


@pytest.mark.parametrize("name", [*sorted(FORMATS), "password", "iri", "regex"])
def test_formats_are_known(name: str) -> None:
    matcher = of_schema({"type": "string", "format": name})
    assert takes_value(matcher, "a b%(") == (name not in FORMATS)


@pytest.mark.parametrize("text", ['{"a":1}', '{"a": 1 }', ' {"a": 1}', '{"a": 1}\n', '{ "a": 1}'])
def test_json_has_one_layout(text: str) -> None:
    """That of json.dumps: where blanks may run on, a small model never ends."""
    assert takes(new("json_object", ""), '{"a": 1}')
    assert not takes(new("json_object", ""), text)
    own = {"type": "object", "x-guidance": {"whitespace_flexible": True}}
    assert not takes(of_schema(own), text)


@pytest.mark.parametrize("text", ['"a\tb"', '"a\x00b"', '"a\\"', '"a', "a", '"\\x"'])
def test_strings_are_json(text: str) -> None:
    for schema in (_TEXT, _TEXT | {"maxLength": 9}, _TEXT | {"pattern": "a"}):
        assert not takes(of_schema(schema), text)


@pytest.mark.parametrize("text", [r'"\u00e9"', r'"\ud83d\ude00"', r'"\n\t\""', r'"\u0000"'])
def test_strings_may_have_escapes(text: str) -> None:
    for schema in (_TEXT, _TEXT | {"maxLength": 3}):
        assert takes(of_schema(schema), text)


@given(st.lists(st.text(min_size=1), min_size=1, max_size=5), st.text())
def test_choices_are_themselves(choices: list[str], other: str) -> None:
    maker = COMPILER.compile("choice", json.dumps(choices))
    assert all(takes(maker(), choice) for choice in choices)
    assert takes(maker(), other) == (other in choices)


@pytest.mark.parametrize(
    "pattern", [r"\d+/\w", r"^(a|ab)(c|bcd)$", "(?i)x{2,}", r"[^\s]", "a\nb", ""]
)
@given(text=st.text("aAbBcCdDxX1/ \n\u0661é", max_size=5))
def test_a_pattern_is_matched_by_the_whole_text(pattern: str, text: str) -> None:
    expected = re.fullmatch(pattern, text, re.ASCII) is not None and text[-1:] != "\n"
    assert takes(new("regex", pattern), text) == expected


@pytest.mark.parametrize("pattern", ["(?=a)b", r"(a)\1", "([", "a{9}" * 3 + "("])
def test_a_bad_pattern_is_named_in_one_line(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        new("regex", pattern)


def test_a_matcher_goes_back_also_over_its_end() -> None:
    matcher = new("regex", "ab*")
    start = matcher.mask()
    assert [matcher.take(token) for token in (*b"ab", END, *b"b")] == [True, True, True, False]
    states = [matcher.is_over]
    matcher.go_back(1)
    assert [*states, matcher.is_over] == [True, False]
    assert matcher.take(ord("b"))
    matcher.go_back(3)
    assert (matcher.mask() == start).all()
    assert np.flatnonzero(np.unpackbits(start.view(np.uint8), bitorder="little")).tolist() == [97]


@pytest.mark.parametrize(
    ("kind", "text"), [("regex", r"[^\s\S]"), ("json_schema", '{"$ref": "#"}')]
)
def test_a_dead_end_is_not_slow(kind: str, text: str) -> None:
    matcher = new(kind, text)
    assert not matcher.mask().any()
    assert not matcher.is_lost
    assert not matcher.take(ord("a"))


def test_a_dead_end_is_left_again() -> None:
    """A draft that leads there may be rejected."""
    loop = {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/a"}}
    schema = {"anyOf": [{"const": 1}, loop], "$defs": {"a": {"$ref": "#/$defs/a"}}}
    matcher = of_schema(schema, is_strict=False)
    start = matcher.mask()
    if matcher.take(ord("[")):
        assert not matcher.mask().any()
        matcher.go_back(1)
    assert (matcher.mask() == start).all()
    assert matcher.take(ord("1"))


def test_requests_use_up_no_states_of_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a matcher share a lexer, of which each counted character takes some states."""
    monkeypatch.setitem(_LIMITS, "max_lexer_states", 1500)
    compiler = GuidanceCompiler([bytes([byte]) for byte in range(256)] + [b""], (END,))
    fields = {f"p{i}": _TEXT | {"maxLength": 90 + i} for i in range(30)}
    new_matcher = compiler.compile("strict_json_schema", json.dumps(_object(**fields)))
    early = new_matcher()
    assert early.take(ord("{"))

    def writes(matcher: Matcher, value: Any) -> bool:
        return all(matcher.mask().any() and matcher.take(b) for b in json.dumps(value).encode())

    assert all(writes(new_matcher(), {name: 80 * "a"}) for name in fields)
    assert all(map(early.take, b'"p5": "b"}'))
    lost = new_matcher()
    assert not writes(lost, dict.fromkeys(fields, 80 * "a"))  # which uses them up alone
    assert lost.is_lost
    assert writes(new_matcher(), {"p3": "a"})


def test_a_matcher_that_is_too_slow_is_lost() -> None:
    """A text that matches in more ways than the limits allow."""
    matcher = new("regex", "(((a{0,90}){0,90}){0,90}){0,90}b?")
    for _ in range(2000):
        matcher.mask()
        if matcher.is_lost:
            break
        matcher.take(ord("a"))
    assert matcher.is_lost
    assert not matcher.mask().any()
    assert not matcher.take(ord("a"))


@pytest.mark.parametrize("pattern", ["[a-z ]{1,20}", "[a-z0-9 -]+", r"\w{1,64}", "(a|very| )*"])
def test_masks_made_together_or_kept_are_those_of_each_token_tried(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [*(bytes([byte]) for byte in range(256)), b"", b"very", b" long", b"A_9", b"a" * 11]
    monkeypatch.setattr(guidance, "_KEPT_S", (-1.0, 60.0))
    monkeypatch.setattr(guidance, "_MOST_KEPT", 9)
    make = GuidanceCompiler(texts, (END,)).compile("regex", pattern)
    monkeypatch.setattr(guidance, "_SLICES", ())
    alone = GuidanceCompiler(texts, (END,))
    for text in 2 * ["a very long word", "x-1 2", "Ab_9", 'say "a"\n']:
        one, other = make(), alone.compile("regex", pattern)()
        for token in text.encode():
            mask = one.mask()
            assert mask.tolist() == other.mask().tolist()
            mask.fill(0)  # which changes none that is kept
            if not (one.take(token) and other.take(token)):
                break
