"""GigaChat 3: calls in turns of their own, whose marks are tokens within the opening."""

from __future__ import annotations

import pytest

from actors.scheduling.request import Frame
from app.text.output.gigachat3 import GigaChat3
from app.text.output.pieces import gathered
from app.text.output.registry import OutputFormats
from tests.app.text.output.answers_by_name import GIGA
from tests.app.text.output.reading import TOOLS, read
from tests.app.text.output.test_held_calls import END, SCHEMAS, compiler, takes, tokens_of

FORMATS = OutputFormats(GigaChat3, None)
ADD = '{"name": "add", "arguments": {"a": 1}}'


def test_the_mark_of_a_turn_is_shown_in_no_stream() -> None:
    parser = FORMATS.parser(TOOLS, is_forced=False, by_argument=True, in_reasoning=False)
    assert gathered(parser.push(["I add", ".", "<|message_sep|>"])) == ("I add.", "", [])
    assert gathered(parser.push(["\n\n", "function call", "<|role_sep|>"])) == ("", "", [])
    assert gathered([*parser.push(list(ADD)), *parser.finish()])[2] == [("add", '{"a": 1}')]


def test_what_speaks_of_a_call_is_text() -> None:
    assert read(FORMATS, list("A function call is no call.")) == (
        "A function call is no call.",
        "",
        [],
    )


@pytest.mark.parametrize("special", [True, False])
def test_calls_are_held_within_text(special: bool) -> None:
    for taken in (f"I add.{GIGA}{ADD}", f"I add.<|function_call|>{ADD}", "A function call."):
        assert takes("gigachat3", taken, special=special)
    for refused in (f'I add.{GIGA}{{"name": "rm"', f"So<|function_call|>{ADD.replace('1', 'x')}"):
        assert not takes("gigachat3", refused, special=special)


def test_calls_stand_in_place_of_a_constrained_answer() -> None:
    names = GigaChat3.special_tokens
    held = GigaChat3.held(SCHEMAS)
    for frame in (
        Frame(calls=GigaChat3.openings, marks=names),
        Frame(calls=GigaChat3.openings, marks=names, held=held),
    ):
        compiled = compiler(names).compile("json_object", "", frame)

        def taken(text: str) -> bool:
            matcher = compiled()  # noqa: B023 (called at once)
            tokens = tokens_of(text, names)
            return all(map(matcher.take, tokens)) and (matcher.is_over or matcher.take(END))

        assert all(map(taken, ("{}", f"{GIGA}{ADD}", f"<|function_call|>{ADD}")))
        assert not taken("So.")
