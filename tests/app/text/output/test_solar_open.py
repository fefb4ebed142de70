"""Solar Open: turns of reasoning, text and calls, one behind the other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from actors.scheduling.request import Frame
from app.text.output.registry import choose_formats
from app.text.output.solar_open import SolarOpen, SolarThink
from tests.app.text.output.reading import CUTS, Read, cut, read
from tests.app.text.output.test_held_calls import END, SCHEMAS, compiler, takes, tokens_of

TEMPLATE = (
    "{{ '<|begin|>assistant<|think|>' + message.reasoning + '<|end|>' }}"
    "{{ '<|begin|>assistant<|tool_calls|>' }}{{ '<|tool_call:begin|>' + call.id }}"
)
FORMATS = choose_formats([TEMPLATE])
NEXT = "<|end|><|begin|>assistant"
THOUGHT = f"<|think|>I add.{NEXT}"


def call(arguments: str, number: str = "a1b2c3d4e5") -> str:
    marks = f"<|tool_call:begin|>{number}<|tool_call:name|>add<|tool_call:args|>"
    return f"{marks}{arguments}<|tool_call:end|>"


ARGUMENTS, BROKEN = '{"a": 1}', '{"a": 1, "b": }'
ADD = call(ARGUMENTS)
ADDED = ("add", {"a": 1})


def test_its_template_shows_both() -> None:
    assert (FORMATS.tools, FORMATS.reasoning) == (SolarOpen, SolarThink)


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (f"{THOUGHT}<|content|>1 < 2.", ("1 < 2.", "I add.", [])),
        (f"{THOUGHT}<|tool_calls|>{ADD}{ADD}<|calls|>", ("", "I add.", [ADDED, ADDED])),
        (f"{THOUGHT}<|content|>So:{NEXT}<|tool_calls|>{ADD}", ("So:", "I add.", [ADDED])),
        ("<|content|>Hi.<|end|>", ("Hi.", "", [])),
        (f"<|tool_calls|>{ADD}", ("", "", [ADDED])),
        ("<|think|>cut off<|en", ("", "cut off<|en", [])),
        ("Hi.", ("Hi.", "", [])),
        (f"<|tool_calls|>{ADD}{call('[]')}Hm.", (f"{call('[]')}Hm.", "", [ADDED])),
    ],
)
@given(cuts=CUTS)
@settings(max_examples=25, deadline=None)
def test_turns_are_told_apart_in_any_cut(answer: str, wanted: Read, cuts: list[int]) -> None:
    assert read(FORMATS, cut(answer, cuts)) == wanted
    assert read(FORMATS, list(answer)) == wanted


def test_a_streamed_call_that_breaks_off_keeps_its_whole_arguments() -> None:
    answer = f"<|tool_calls|>{call(BROKEN)}Hm."
    assert read(FORMATS, list(answer)) == ("Hm.", "", [ADDED])


def test_the_text_of_a_constrained_answer_may_have_its_mark() -> None:
    names = tuple(sorted(FORMATS.special_tokens(with_tools=True), key=len, reverse=True))
    held = SolarOpen.held(SCHEMAS)
    frame = Frame(SolarThink.marks(""), heads=SolarThink.heads, held=held)

    def taken(text: str) -> bool:
        matcher = compiler(names).compile("regex", "[0-9]+", frame)()
        tokens = tokens_of(text, names)
        return all(map(matcher.take, tokens)) and (matcher.is_over or matcher.take(END))

    answers = ("12", "<|content|>12", f"<|tool_calls|>{ADD}")
    assert all(taken(before + one) for before in ("", THOUGHT) for one in answers)
    assert not any(map(taken, ("So.", f"{THOUGHT}<|content|>So.", f"<|tool_calls|>{call('{}')}")))


def test_an_id_has_ten_letters_or_digits() -> None:
    assert takes("solar_open", f"<|tool_calls|>{ADD}", special=True)
    assert not takes("solar_open", f"<|tool_calls|>{call(ARGUMENTS, 'NO-ID')}", special=True)
