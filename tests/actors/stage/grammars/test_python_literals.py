from __future__ import annotations

import json
import re
from typing import Any

import pytest

from actors.scheduling.request import Frame, HeldCall, HeldCalls, HeldPart
from actors.stage.grammars.guidance import GuidanceCompiler

END = 256
TEXTS = [*(bytes([byte]) for byte in range(256)), b""]


def compiled(schema: Any, kind: str = "python") -> Any:
    """A grammar of calls `f(...)`; gives matchers."""
    parts = (HeldPart("text", "f("), HeldPart(kind, json.dumps(schema)), HeldPart("text", ")"))
    held = HeldCalls("", "", (HeldCall("f", parts),), None, "")
    frame = Frame(held=(held,), most_calls=1)
    return GuidanceCompiler(TEXTS, (END,)).compile("text", "", frame)


def taken(schema: Any, arguments: list[str], kind: str = "python") -> list[str]:
    """Which of these may be written."""
    make = compiled({"type": "object", **schema}, kind)

    def takes(text: str) -> bool:
        matcher = make()
        return all(map(matcher.take, f"f({text})".encode())) and matcher.is_over

    return [text for text in arguments if takes(text)]


def of(schema: Any) -> dict[str, Any]:
    return {"properties": {"a": schema}, "required": ["a"], "additionalProperties": False}


NODE = {
    "type": "object",
    "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["next"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, ['"x\'"', "'x\"'", '"\\n\\u00e9\\x41 é\t"', "'\\U0001f600'", '""'],
         ["x", "1", '"a\nb"', '"\\N{DASH}"', '"\\q"', '"\\777"', '"""a"""', 'b"a"', '"a" "b"']),
        ({"type": "string", "pattern": "^[a-c/]+$"}, ['"ab/"'], ['"d"', '"\\/"', "'ab'"]),
        ({"type": "string", "maxLength": 2}, ['"ab"'], ['"abc"']),
        ({"type": "integer", "minimum": 2}, ["2", "10"], ["1", "2.0", "02", "1_0", "0x2", "'2'"]),
        ({"minimum": 0, "maximum": 1}, ["0", "0.5"], ["2", "-0.5"]),
        ({"type": "number"}, ["-1", "0.5", "1e5", "0"], ["1e999", "inf", "1j", ".5", "1."]),
        ({"type": "boolean"}, ["True", "False"], ["true", "1", "None", "not True"]),
        ({"type": ["integer", "null"]}, ["None", "3"], ["null", "True"]),
        ({"enum": ["it's", 1, None, True]}, ['"it\'s"', "1", "None", "True"], ["2", "'its'"]),
        ({"type": "string", "enum": ["x", 1]}, ["'x'", '"x"'], ["1"]),
        ({"enum": ["it's", "no", 1, 5, None], "minLength": 3, "minimum": 2, "items": {}},
         ['"it\'s"', "5", "None"], ['"no"', "1"]),
        ({"type": "string", "enum": ["ab", "cd"], "pattern": "^a"}, ['"ab"'], ['"cd"']),
        ({"type": "integer", "nullable": True, "x-of": "a", "discriminator": {}}, ["1"], ["'x'"]),
        ({"contentEncoding": "base64"}, ["'x'", "1"], []),
        ({"anyOf": [{"type": "integer"}], "x-of": 1}, ["1"], ["'x'"]),
        ({"const": {"k": [1]}}, ["{'k': [1]}"], ["{'k': [2]}"]),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
         ["[True]", "[True,False]", "[True, False]"], ["[]", "[1]", "[True, True, True]"]),
        ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
        ({"type": "array", "maxItems": 1}, ["[]", "[None]"], ["[1, 2]"]),
        ({"anyOf": [{"type": "integer"}, {"type": "array"}], "default": None},
         ["1", "[{'k': [None]}, -1]"], ["'x'"]),
        ({"type": "object", "properties": {"x": {"type": "integer"}, "y": {}, "z": {}},
          "required": ["z"]},
         ["{'z': 1}", '{"x": 1, "z": None}', "{'x':1, 'y': 2, 'z': [3]}"],
         ["{}", "{'x': 1}", "{'z': 1, 'x': 1}", "{'z': 1, 'w': 1}", "{'x': 'a', 'z': 1}"]),
        ({"type": "object", "properties": {"x": {"type": "integer"}},
          "additionalProperties": {"type": "boolean"}},
         ["{}", "{'x': 1, 'y': True}", "{'y': True}"], ["{'x': True}", "{'y': 1}"]),
        ({"$ref": "#/$defs/node"}, ["{'next': {'next': None}}"], ["{}", "{'next': 1}", "None"]),
        ({}, ["1", "'x'", "[1, [None]]", "{'k': {}}"], ["x", "(1, 2)", "{1}", "f()", "null"]),
    ],
)  # fmt: skip
def test_values_in_pythons_syntax_keep_to_their_schema(
    schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    written = [f"a={value}" for value in (*good, *bad)]
    assert taken({**of(schema), "$defs": {"node": NODE}}, written) == written[: len(good)]


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "boolean"}, ["true", "False"], ["null", "1"]),
        ({"type": ["integer", "null"]}, ["None", "null", "3"], ["true"]),
        ({"enum": ["x", True, [None, "y"]]}, ["'x'", '"x"', "true", "True", "[null, \"y\"]"],
         ["x", "false", "[true, 'y']"]),
        ({"enum": ["\ud800\U0001f600"]}, ['"\\ud800\\ud83d\\ude00"', "'\\ud800\U0001f600'"], []),
        ({}, ["[true, {'k': null}]", "[None, True]"], ["nul"]),
    ],
)  # fmt: skip
def test_constants_of_json_are_taken_where_a_family_writes_them(
    schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    written = [f"a={value}" for value in (*good, *bad)]
    assert taken(of(schema), written, "python_or_json") == written[: len(good)]


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"properties": {"a": {}, "b": {}, "c": {}}, "required": ["b"]},
         ["b=1", "a=1, b=2", "a=1,b=2, c=3"],
         ["", "a=1", "b=1, a=2", "a=1, c=2", "b=1,", "b=1, b=2", "d=1, b=1", "b = 1", "1"]),
        ({"properties": {"a": False, "b-c": {"type": "boolean"}}}, ["", "b-c=True"], ["a=1"]),
        ({"properties": {"a": {"type": "integer"}}, "additionalProperties": True},
         ["", "a=1, x=None", "x='a', y_1=2"], ["a='x'", "x y=1", "1x=1"]),
        ({"properties": {"größe": {"type": "integer"}, "名": {}}},
         ["größe=1, 名='x'"], ["größe='x'"]),
        ({}, ["", "any_thing=[1]"], ["1", "*x"]),
        ({"required": ["a"]}, ["a=1", "a=1, b=2"], ["", "b=1"]),
        ({"$ref": "#/$defs/f", "$defs": {"f": of({})}, "title": "F"}, ["a=1"], ["", "b=1"]),
        ({"type": ["object", "null"], "properties": {"a": {}}, "nullable": True}, ["", "a=1"], []),
    ],
)  # fmt: skip
def test_arguments_are_those_that_are_declared(
    schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    assert taken(schema, [*good, *bad]) == good


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (of({"not": {}}), "'not'"),
        (of({"type": "array", "uniqueItems": True}), "'uniqueItems'"),
        (of({"allOf": [{"type": "string"}, {"pattern": "a"}]}), "'allOf'"),
        (of({"$ref": "#/$defs/none"}), "#/$defs/none"),
        (of({"type": "text"}), "'text'"),
        (of({"type": "integer", "enum": ["a"]}), "nothing"),
        (of({"anyOf": [{}], "minLength": 2}), "'minLength'"),
        (of({"enum": [[1], [2, 3]], "maxItems": 1}), "'maxItems'"),
        ({"minProperties": 1}, "'minProperties'"),
        ({"anyOf": [{}]}, "'anyOf'"),
        ({"$ref": "#/$defs/f", "$defs": {"f": {}}, "required": ["a"]}, "'required'"),
        ({"properties": {"no name": {}}}, "'no name'"),
        ({"type": "array"}, "no object"),
        ({"properties": None}, "'properties'"),
        (of({"type": "object", "required": [1]}), "'required'"),
        ({"required": "ab"}, "'required'"),
        (of({"type": "array", "minItems": "x"}), "'minItems'"),
        (of({"type": "array", "maxItems": -1}), "'maxItems'"),
        (of({"type": ["string", ["x"]]}), "malformed"),
        ({"properties": {}, "required": [[]]}, "malformed"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=rf"{re.escape(words)}.*, in the parameters of 'f'"):
        compiled({"type": "object", **schema})


def test_so_is_its_parameter() -> None:
    nested = {"type": "object", "properties": {"b": {"not": {}}}}
    with pytest.raises(ValueError, match="'not' here, in 'a', in the parameters of 'f'"):
        compiled({"type": "object", "properties": {"x": {}, "a": nested}})
