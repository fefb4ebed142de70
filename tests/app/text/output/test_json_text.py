"""The text of a call of a custom tool: read out of its arguments in any cut."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.text.output.hermes import Hermes
from app.text.output.json_text import InputText
from app.text.output.pieces import CallDelta, Text, gathered
from app.text.output.registry import OutputFormats
from tests.app.text.output.reading import CUTS, cut

TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('"\\\n😀é{}'))
SCHEMA = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def read(parts: Sequence[str]) -> str:
    reader = InputText()
    return "".join([*map(reader.push, parts), reader.finish()])


@given(text=TEXTS, cuts=CUTS, ascii_only=st.booleans())
@settings(max_examples=200, deadline=None)
def test_the_text_is_read_in_any_cut(text: str, cuts: list[int], ascii_only: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    assert read(cut(arguments, cuts)) == text
    assert read(list(arguments)) == text
    assert read([f' {{ "input" :\n{json.dumps(text)} , "more": 1}}']) == text


def test_text_is_given_as_soon_as_it_is_whole() -> None:
    reader = InputText()
    parts = ['{"inp', 'ut": "a', "b\\", "n\\u00", "e9\\ud83d", "\\ude00", 'c"', "}"]
    assert [reader.push(part) for part in parts] == ["", "a", "b", "\n", "é", "😀", "c", ""]
    assert reader.finish() == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (r'{"input": "a\ud83d b"}', "a\ufffd b"),
        (r'{"input": "a\ud83d\n"}', "a\ufffd\n"),
        (r'{"input": "\ud83d\ud83d\ude00"}', "\ufffd\U0001f600"),
        (r'{"input": "\ude00"}', "\ufffd"),
    ],
)
def test_half_a_surrogate_pair_is_no_text(arguments: str, text: str) -> None:
    assert read([arguments]) == read(list(arguments)) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"why": "so", "input": "a\\n"}', "a\n"),
        ('{"patch": "a\\n"}', "a\n"),
        ('{"a": "b", "c": "d"}', '{"a": "b", "c": "d"}'),
        ('{"input": 1}', '{"input": 1}'),
        ("{}", ""),
        ("", ""),
        ('{"inp', ""),
    ],
)
def test_arguments_of_another_form_are_given_at_their_end(arguments: str, text: str) -> None:
    assert read([arguments]) == read(list(arguments)) == text


@pytest.mark.parametrize("by_argument", [False, True])
@pytest.mark.parametrize("is_forced", [False, True])
def test_only_calls_of_custom_tools_have_a_text(by_argument: bool, is_forced: bool) -> None:
    parser = OutputFormats(Hermes, None).parser(
        {"patch": SCHEMA, "add": {}},
        is_forced=is_forced,
        by_argument=by_argument,
        in_reasoning=False,
        custom={"patch"},
    )
    calls = [
        {"name": "patch", "arguments": {"input": 'a"\n'}},
        {"name": "patch", "arguments": {"diff": "b"}},
        {"name": "add", "arguments": {"input": "c"}},
        {"name": "patch", "arguments": {}},
        {"name": "patch", "arguments": {"diff": "d"}},
    ]
    answer = json.dumps(calls)
    if not is_forced:
        answer = ".".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
    found = [*(piece for char in answer for piece in parser.push([char])), *parser.finish()]
    assert gathered(found)[2] == [
        ("patch", 'a"\n'),
        ("patch", "b"),
        ("add", '{"input": "c"}'),
        ("patch", ""),
        ("patch", "d"),
    ]
    assert all(
        piece.is_custom == (piece.index != 2) for piece in found if isinstance(piece, CallDelta)
    )
    order = [piece.index for piece in found if isinstance(piece, CallDelta)]
    assert order == sorted(order)
    if not is_forced:  # a text that comes late is still before what follows its call
        kinds = ["." if isinstance(piece, Text) else "c" for piece in found]
        assert re.fullmatch(r"(?:c+\.){4}c+", "".join(kinds))
