"""Calls of GLM: values by the tool's schema, and texts that begin as a call does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from app.text.output.glm import Glm4, Glm45, LongCat, LongCatThink
from app.text.output.pieces import Text
from app.text.output.registry import OutputFormats
from tests.app.text.output.reading import CUTS, TOOLS, cut, read
from tests.app.text.output.test_held_calls import takes

TAGS = OutputFormats(Glm45, None)
ONE = ("add", {"a": 1})


@pytest.mark.parametrize(
    ("declared", "text", "value"),
    [
        ({"type": "string"}, "1", "1"),
        ({"type": "string"}, "\n a \n", "\n a \n"),
        ({"type": "integer"}, "1", 1),
        ({"type": "integer"}, "one", "one"),
        ({"type": "boolean"}, "True", True),
        ({}, '{"x": 1}', {"x": 1}),
        ({}, "x y", "x y"),
    ],
)
def test_a_value_has_the_type_that_the_tool_declares(
    declared: dict[str, str], text: str, value: object
) -> None:
    answer = f"<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    schema = {"properties": {"a": declared}}
    assert read(TAGS, [answer], tools={"add": schema}) == ("", "", [("add", {"a": value})])


def test_an_answer_that_is_no_call_streams_from_its_first_word() -> None:
    parser = OutputFormats(Glm4, None).parser(
        TOOLS, is_forced=False, by_argument=True, in_reasoning=False
    )
    assert parser.push(["\nSum"]) == []
    assert parser.push(["s "]) == [Text("\nSums ")]
    assert parser.push(["are"]) == [Text("are")]


@pytest.mark.parametrize(
    "call",
    [
        "add\n<longcat_arg_key>a</longcat_arg_key>\n<longcat_arg_value>1</longcat_arg_value>\n",
        '\n{"name": "add", "arguments": {"a": 1}}\n',
    ],
)
def test_longcat_reasons_and_calls_between_tags_of_its_own(call: str) -> None:
    formats = OutputFormats(LongCat, LongCatThink)
    written = f"So: <longcat_tool_call>{call}</longcat_tool_call>"
    answer = f"<longcat_think>\nI add.\n</longcat_think>{written}"
    assert read(formats, list(answer)) == ("So: ", "I add.", [("add", {"a": 1})])
    for special in (True, False):
        assert takes("longcat", written, special=special)
        assert not takes("longcat", written.replace("1", "x"), special=special)


def test_a_key_of_glm_without_its_end_takes_no_other_along() -> None:
    answer = Glm45.written([ONE] * 3).replace("</arg_key>", "", 1)
    assert read(TAGS, list(answer))[2] == [ONE] * 2


@pytest.mark.parametrize(
    ("bad", "num_sent"),
    [
        *(('rm\n{"add": "\\nadd"}', 0), ("rm", 0), ("add\nnow\n[1]", 0), ("add, add", 0)),
        *(('add\n{"a": 1\nThat is', 0), ('add\n{"a": 1, b}', 1), ('add\n{"b": it"s}', 0)),
    ],
)
@given(cuts=CUTS)
@settings(max_examples=5, deadline=None, derandomize=True)
def test_a_malformed_call_of_glm4_takes_no_other_along(
    bad: str, num_sent: int, cuts: list[int]
) -> None:
    formats = OutputFormats(Glm4, None)
    one, two = ('add\n{"a": 1}', 'add\n{"a": 2}')
    answer = f"{one}\n{bad}\n{two}\n{bad}\n{bad}\n{one}\nDone.\nnow"
    ones = [("add", {"a": number}) for number in (1, 2, 1)]
    for chunks in ([answer], list(answer), cut(answer, cuts)):
        text, _, calls = read(formats, chunks, by_argument=False)
        assert (text, calls) == (f"{bad}{bad}\n{bad}Done.\nnow", ones)
        sent = [ONE] * num_sent
        assert read(formats, chunks)[2] == [ones[0], *sent, ones[1], *sent * 2, ones[2]]
    assert read(formats, [f"{bad}\n{one}"], by_argument=False) == (f"{bad}\n{one}", "", [])
