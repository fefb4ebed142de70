"""Calls behind a grammar, which makes them and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from app.text.output.hermes import Hermes
from app.text.output.pieces import CallDelta, Text
from app.text.output.registry import OutputFormats
from tests.app.text.output.reading import CUTS, TOOLS, cut, pieces_of, read

HERMES = OutputFormats(Hermes, None)
CALL = '{"name": "add", "arguments": {"a": 1, "b": "x}\\"{"}}'


@pytest.mark.parametrize(
    "answer", [CALL, f"[{CALL}]", f"[{CALL}, {CALL}]", f" [ {CALL}\n,{CALL} ] "]
)
@given(cuts=CUTS)
@settings(max_examples=20, deadline=None)
def test_forced_calls(answer: str, cuts: list[int]) -> None:
    found = read(HERMES, cut(answer, cuts), is_forced=True)
    assert found == ("", "", [("add", {"a": 1, "b": 'x}"{'})] * answer.count("name"))


def test_forced_arguments_before_the_name_wait_for_it() -> None:
    answer = '{"arguments": {"a": [1]}, "name": "add"}'
    assert read(HERMES, list(answer), is_forced=True) == ("", "", [("add", {"a": [1]})])


def test_forced_arguments_stream_character_by_character() -> None:
    parser = HERMES.parser(TOOLS, is_forced=True, by_argument=True, in_reasoning=False)
    parser.push(['{"name": "add", "arguments": '])
    assert parser.push(['{"b": "lo']) == [CallDelta(0, None, '{"b": "lo')]
    assert parser.push(["ng"]) == [CallDelta(0, None, "ng")]


@pytest.mark.parametrize("by_argument", [False, True])
@pytest.mark.parametrize(
    ("answer", "cut_calls"),
    [
        (f"[{CALL}]", set()),
        (f"[{CALL}", set()),
        (f"[{CALL}, ", set()),
        (CALL[:-1], {0}),
        (f"[{CALL}, {CALL[:-9]}", {1}),
        (f"{CALL[:-1]}]", {0}),
    ],
)
def test_a_forced_call_that_is_cut_is_known(
    answer: str, cut_calls: set[int], by_argument: bool
) -> None:
    parser = HERMES.parser(TOOLS, is_forced=True, by_argument=by_argument, in_reasoning=False)
    parser.push(list(answer))
    parser.finish()
    assert parser.cut_calls == cut_calls
    assert parser.calls_tools is not bool(cut_calls)


def test_text_where_a_grammar_was_to_make_calls_is_shown() -> None:
    found = pieces_of(HERMES, list("Sorry."), by_argument=True, is_forced=True)
    assert "".join(piece.text for piece in found if isinstance(piece, Text)) == "Sorry."
