"""Arguments between tags: held to any schema, and read as what it says."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from actors.scheduling.request import Frame
from actors.stage.grammars.guidance import GuidanceCompiler
from app.text.output.pieces import MOST_MISREAD, AnswerPieces, gathered
from app.text.output.qwen3_coder import Qwen3Coder
from app.text.output.registry import TOOL_FORMATS, OutputFormats
from app.text.output.source import Source
from app.text.output.tags import Tags
from tests.app.text.output.reading import pieces_of

END = 256
NULL = {"type": "null"}
TEXT = {"type": "string"}
INTEGER = {"type": "integer"}
KEYED: dict[str, Any] = {
    "type": "object",
    "properties": {"k": INTEGER},
    "required": ["k"],
    "additionalProperties": False,
}
DEFINITIONS: dict[str, Any] = {
    "digits": {"enum": ["1", "2"]},
    "tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
    "loop": {"anyOf": [*[{"$ref": "#/$defs/loop"}] * 9, INTEGER]},
}

# A value's schema, values that are of it, and some that are not.
VALUES: list[tuple[Any, list[Any], list[Any]]] = [
    (TEXT, ["", "x", "1", "null", "a\n <b> {\n", "\n\n"], []),
    (INTEGER, [1, -5], ["x", 1.5, "", None]),
    ({"type": "number"}, [1, 0.5], ["x"]),
    ({"type": "boolean"}, [True, False], ["yes", 1]),
    ({"anyOf": [TEXT, NULL], "default": None}, [None, "x {", ""], []),
    ({"type": ["integer", "null"]}, [None, 3], ["x"]),
    ({"enum": ["red", "blue"]}, ["red"], ["green", "", "re", "redder"]),
    ({"type": "string", "enum": ["", "x", None]}, ["", "x"], ["y", None]),
    ({"type": "number", "enum": [1, 2.5]}, [1, 2.5], [3]),
    ({"const": "1"}, ["1"], ["2"]),
    ({"type": "string", "pattern": "^[a-z]{2,4}$"}, ["ab", "abcd"], ["a", "abcde", "Ab"]),
    ({"type": "string", "pattern": "b+\\\\$"}, ["b\\"], ["a\\", "b", "b\\c"]),
    ({"type": "string", "pattern": "[0-9]"}, ["a1\nb"], ["ab"]),
    ({"anyOf": [{"type": "string", "pattern": "^a+$"}, NULL]}, ["aa", None], ["b"]),
    ({"anyOf": [TEXT, {"type": "integer", "minimum": 5}]}, ["x", 7, "3", "07", "5.5"], []),
    ({"anyOf": [{"enum": ["7"]}, {"type": "integer", "minimum": 50}]}, ["7", 50], [8]),
    ({"anyOf": [{"type": "string", "pattern": "^[1-9]$"}, {"const": 100}]}, ["7", 100], ["x"]),
    ({"anyOf": [TEXT, KEYED]}, ["x y", {"k": 1}], [{"k": "x"}, [1]]),
    (KEYED, [{"k": 1}], [{"k": "x"}, {}, "x"]),
    ({"properties": {"k": INTEGER}}, [{"k": 1}, {}], [{"k": "x"}, 1]),
    ({"type": "array", "items": TEXT}, [[], ["a", "b"]], [[1]]),
    ({"items": TEXT}, [["</parameter>", "</arg_value>"]], [[1]]),
    ({"properties": {"k": TEXT}}, [{"k": "</parameter></arg_value>"}], [{"k": 1}]),
    ({"$ref": "#/$defs/digits"}, ["1"], ["3"]),
    ({"allOf": [{"$ref": "#/$defs/digits"}]}, ["2"], ["3"]),
    ({"$ref": "#/$defs/tree"}, [[], [[[]]]], [[1], 1]),
    ({"$ref": "#/$defs/loop"}, [5], ["x"]),
    ({}, [1, "x", [1]], []),
    ({"pattern": "^[a-z]+$"}, ["ab", 1, 1.5, None, True, [1], {"k": [1]}], ["Ab", "1 2"]),
    ({"pattern": "^[0-9]$", "minimum": 5}, ["3", 7, 12, [1]], [3.5, "x"]),
    ({"pattern": "^[a-z]+$", "minItems": 2}, ["ab", 1, [1, 2]], [[1], "["]),
    ({"minimum": 5}, ["x", "3", 7, None, [1]], []),
    ({"multipleOf": 5, "title": "x"}, ["x", "3", 10], []),
    ({"minItems": 2}, ["x", 1, [1, 2], {}], [[1], "["]),
    ({"required": ["k"], "default": {"k": 1}}, ["x", 1, {"k": 1}], [{}]),
    ({"anyOf": [{"pattern": "^[a-z]+$"}, {"const": "B"}]}, ["ab", "B", 1, [1]], ["C"]),
    ({"anyOf": [{"type": "string", "pattern": "^a+$"}, {"type": "number"}]}, ["aa", 1.5], ["b"]),
    ({"type": ["string", "number"], "pattern": "^a+$", "minimum": 5}, ["aa", 7], ["b", 3, "3"]),
]


@cache
def compiler() -> GuidanceCompiler:
    return GuidanceCompiler([*(bytes([byte]) for byte in range(256)), b""], (END,))


def takes(name: str, schema: dict[str, Any], arguments: dict[str, Any]) -> bool:
    """Whether a call may have these arguments, and, where it may, that they are read."""
    one = TOOL_FORMATS[name]
    frame = Frame(calls=one.openings, held=one.held({"f": json.dumps(schema)}))
    matcher = compiler().compile("text", "", frame)()
    written = one.written([("f", arguments)])
    if not (all(map(matcher.take, written.encode())) and matcher.take(END)):
        return False
    pieces = pieces_of(OutputFormats(one, None), [written], by_argument=True, tools={"f": schema})
    text, _, calls = gathered(pieces)
    assert (text, [(called, json.loads(given)) for called, given in calls]) == (
        "",
        [("f", arguments)],
    )
    return True


@pytest.mark.parametrize("name", ["glm45", "qwen3_coder"])
@pytest.mark.parametrize(("value", "taken", "refused"), VALUES)
def test_values_are_of_their_schemas_and_read_so(
    value: Any, taken: list[Any], refused: list[Any], name: str
) -> None:
    schema = {"type": "object", "properties": {"v": value}, "$defs": DEFINITIONS}
    assert [one for one in taken if not takes(name, schema, {"v": one})] == []
    assert [one for one in refused if takes(name, schema, {"v": one})] == []


@pytest.mark.parametrize(
    ("name", "text"), [("glm45", "a</arg_value>b"), ("qwen3_coder", "a</parameter>b")]
)
def test_a_listed_text_that_would_end_its_value_is_left_out(name: str, text: str) -> None:
    schema = {"type": "object", "properties": {"v": {"enum": ["x", text]}}}
    assert takes(name, schema, {"v": "x"})
    assert not takes(name, schema, {"v": text})


LARGE = {"type": "object", "properties": {f"q{n}": INTEGER for n in range(99)}}
OPTIONAL = {"type": "object", "properties": {"a": INTEGER, "b": TEXT}, "required": ["a"]}


@pytest.mark.parametrize("name", ["glm45", "minimax_m2", "qwen3_coder"])
@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        (OPTIONAL, [{"a": 1}, {"a": 1, "b": "x"}], [{}, {"b": "x"}, {"b": "x", "a": 1}, {"c": 1}]),
        ({**OPTIONAL, "additionalProperties": TEXT},
         [{"a": 1, "c": "1", "d": "x"}], [{"c": "1"}, {"a": 1, "c<": "x"}]),
        ({**OPTIONAL, "additionalProperties": TEXT},
         [{"a": 1, "c d": "x", "é": "y"}], [{"a": 1, " c": "x"}, {"a": 1, "c\nd": "x"}]),
        ({"properties": {"user id": INTEGER, 'q"s\tt': TEXT}, "required": ["user id"]},
         [{"user id": 1}, {"user id": 1, 'q"s\tt': "x"}], [{"user": 1}, {"user id": "x"}]),
        ({"type": "object"}, [{}, {"x": 1, "y": "z"}], []),
        ({"type": "object", "properties": {}}, [{}], [{"x": 1}]),
        ({"$ref": "#/$defs/all", "$defs": {"all": OPTIONAL}}, [{"a": 1}], [{}]),
        ({"type": "object", "required": ["x"]}, [{"x": 1}, {"x": 1, "y": 2}], [{}]),
    ],
)  # fmt: skip
def test_parameters_are_those_of_the_schema(
    schema: dict[str, Any], taken: list[Any], refused: list[Any], name: str
) -> None:
    assert [one for one in taken if not takes(name, schema, one)] == []
    assert [one for one in refused if takes(name, schema, one)] == []


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"minProperties": 1}, "minProperties"),
        ({"anyOf": [OPTIONAL]}, "anyOf"),
        *(({"properties": {name: {}}}, "no tag") for name in ("", " a", "a ", "a\nb", "a>")),
        ({"properties": {"a": {"type": "string", "not": {}}}}, "'not', in 'a'"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "no value"),
        ({"properties": ["a"]}, "properties"),
        ({"$ref": "#/$defs/none"}, "no object"),
        ({"properties": {f"p{n}": LARGE for n in range(99)}}, "too long"),
        ({"properties": {"a": {"anyOf": [LARGE] * 99}}}, "too long"),
    ],
)
def test_what_cannot_be_kept_is_named_with_its_tool(schema: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=f"{why}.*in the parameters of 'odd'"):
        TOOL_FORMATS["qwen3_coder"].held({"odd": json.dumps(schema)})


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_the_schemas_of_many_tools_are_bounded_together(name: str) -> None:
    """They are written on the loop that all streams share."""
    one = json.dumps({"properties": {f"p{n}": LARGE for n in range(2)}})
    assert TOOL_FORMATS[name].held({"f": one})
    with pytest.raises(ValueError, match=r"too long.*in the parameters of 'f"):
        TOOL_FORMATS[name].held({f"f{n}": one for n in range(99)})


def test_a_held_constant_may_be_of_python() -> None:
    answer = (
        "<tool_call>\n<function=f>\n<parameter=v>\nNone\n</parameter>\n</function>\n</tool_call>"
    )
    optional = {"properties": {"v": {"type": ["integer", "null"]}}}
    held = TOOL_FORMATS["qwen3_coder"].held({"f": json.dumps(optional)})
    matcher = compiler().compile("text", "", Frame(held=held))()
    assert all(map(matcher.take, answer.encode()))


def test_tools_that_come_back_at_every_turn_are_written_once() -> None:
    """On the front's loop, where it takes a third of a millisecond for each kilobyte."""
    tags = Tags("<", ">", "</>")
    usual, long = json.dumps(KEYED), json.dumps({**KEYED, "description": "x" * 5000})
    found = [tags.held({"f": usual, "g": long}) for _ in range(2)]
    assert found[0]["f"] is found[1]["f"]
    assert found[0]["g"] is not found[1]["g"]
    assert found[0] == found[1]
    assert found[0]["f"] == found[0]["g"]


@pytest.mark.parametrize("name", ["glm45", "minimax_m2", "qwen3_coder", "seed_oss"])
def test_calls_may_stand_in_place_of_a_constrained_answer(name: str) -> None:
    one = TOOL_FORMATS[name]
    held = one.held({"f": json.dumps(OPTIONAL)})
    compiled = compiler().compile("json_object", "", Frame(calls=one.openings, held=held))

    def taken(text: str) -> bool:
        matcher = compiled()
        return all(map(matcher.take, text.encode())) and (matcher.is_over or matcher.take(END))

    assert taken("{}")
    assert taken(one.written([("f", {"a": 1, "b": "x"})]))
    assert not taken(one.written([("f", {"b": "x"})]))
    assert not taken("So.")


class CountedSource(Source):
    """num_searched: characters that were searched for a mark."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.num_searched = 0
        self.feed(text)
        self.ended = True

    def _first(self, marks: tuple[str, ...], start: int) -> tuple[int, str]:
        place, mark = super()._first(marks, start)
        self.num_searched += (place if mark else len(self.text)) - start
        return place, mark


@pytest.mark.parametrize("rest", ["", '<parameter=z">"]</parameter>'], ids=["no end", "no JSON"])
def test_values_whose_strings_have_no_end_are_read_in_linear_time(rest: str) -> None:
    """A quotation mark in each name keeps the number of them odd."""
    num_values = 1200
    values = "".join(f'<parameter=k"{n}>["</parameter>' for n in range(num_values))
    text = f"<function=f>{values}{rest}</function>"
    tools = {"f": {"additionalProperties": {"type": "array"}}}
    source, out = CountedSource(text), AnswerPieces(tools, by_argument=True)
    assert list(Qwen3Coder().read(source, out)) == []
    ((name, arguments),) = gathered(out.pop_all())[2]
    assert (name, json.loads(arguments)['k"7']) == ("f", '["')
    assert len(json.loads(arguments)) == num_values + bool(rest)
    assert source.num_searched <= 3 * len(text) + MOST_MISREAD


TWICE = "<parameter=a>1</parameter>" * 2


@pytest.mark.parametrize("properties", [5, True, None, ["a"], "a"])
def test_a_repeated_argument_counts_once_where_the_schema_declares_none(properties: Any) -> None:
    formats = OutputFormats(Qwen3Coder, None)
    improper = {"properties": properties}
    for schema in (improper, {"$ref": "#/$defs/all", "$defs": {"all": improper}}):
        text = f"<function=f>{TWICE}</function>"
        pieces = pieces_of(formats, [text], by_argument=False, tools={"f": schema})
        assert gathered(pieces) == ("", "", [("f", '{"a": 1}')])


def test_an_argument_declared_behind_a_reference_is_not_repeated() -> None:
    schema = {"$ref": "#/$defs/all", "$defs": {"all": OPTIONAL}}
    text = f"<function=f>{TWICE}</function>"
    pieces = pieces_of(
        OutputFormats(Qwen3Coder, None), [text], by_argument=False, tools={"f": schema}
    )
    assert gathered(pieces) == (text, "", [])
