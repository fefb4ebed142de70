"""Calls behind a grammar, which makes them and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from actors.scheduling.request import Frame
from app.text.output.cohere import CohereThink
from app.text.output.harmony import HarmonyChannels
from app.text.output.hermes import Hermes
from app.text.output.interface import ReasoningFormat
from app.text.output.pieces import CallDelta, Text
from app.text.output.registry import TOOL_FORMATS, OutputFormats
from app.text.output.solar_open import SolarThink
from app.text.output.thinking import GraniteThink
from tests.app.text.output.answers import ADD
from tests.app.text.output.reading import CUTS, TOOLS, cut, pieces_of, read
from tests.app.text.output.test_held_calls import (
    COMMENTARY,
    END,
    SCHEMAS,
    START,
    compiler,
    tokens_of,
)

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


FORCED: dict[str, tuple[type[ReasoningFormat], list[str], list[str]]] = {
    "harmony": (
        HarmonyChannels,
        [f"<|channel|>analysis<|message|>Hm.<|end|>{START}"],
        ["<|channel|>analysis<|message|>Hm.", "So:", f"{COMMENTARY}<|message|>So.<|end|>{START}"],
    ),
    "granite": (GraniteThink, ["<think>Hm.</think>\n\n"], ["Hm.", "<think>Hm."]),
    "cohere": (CohereThink, ["<|START_THINKING|>Hm.<|END_THINKING|>"], ["So:"]),
    "solar_open": (
        SolarThink,
        ["<|think|>Hm.<|end|><|begin|>assistant"],
        ["<|think|>Hm.<|end|>", "<|content|>So.<|end|><|begin|>assistant"],
    ),
}


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", FORCED)
def test_an_answer_that_has_to_call_is_reasoning_and_a_call_as_the_family_writes_it(
    name: str, special: bool
) -> None:
    reasoning, befores, others = FORCED[name]
    one = TOOL_FORMATS[name]
    formats = OutputFormats(one, reasoning)
    schemas = {**SCHEMAS, "add": SCHEMAS["add"][:-1] + ', "not": {}}'}  # which is left out
    names = tuple(sorted(formats.special_tokens(with_tools=True), key=len, reverse=True))
    special_names = names if special else ()

    def takes(text: str, most_calls: int = 16) -> bool:
        marks = reasoning.marks("Use <think></think>.")
        frame = Frame(marks, held=one.forced(schemas), most_calls=most_calls)
        matcher = compiler(special_names).compile("text", "", frame)()
        tokens = tokens_of(text, special_names)
        return all(map(matcher.take, tokens)) and (matcher.is_over or matcher.take(END))

    written = one.written([ADD])
    for before in ("", *befores):
        assert takes(f"{before}{written}")
        found = read(formats, list(f"{before}{written}"))
        assert found == ("", "Hm." if before else "", [ADD])
    refused = ["", *befores, *(f"{before}{written}" for before in others), f"{written} So."]
    refused += [one.written([call]) for call in (("add", {"a": "x"}), ("sub", {}))]
    assert [text for text in refused if takes(text)] == []
    has_lists = name != "harmony"
    assert takes(one.written([ADD] * 16)) is has_lists
    assert not takes(one.written([ADD] * 17))
    assert takes(written, 1)
    assert not takes(one.written([ADD] * 2), 1)
