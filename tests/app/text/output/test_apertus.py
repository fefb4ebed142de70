"""Apertus: reasoning before calls, and calls that are held or have to be made."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from actors.scheduling.request import Frame
from app.text.output.apertus import Apertus, ApertusThink
from app.text.output.registry import OutputFormats
from tests.app.text.output.answers_by_name import APERTUS, APERTUS_END
from tests.app.text.output.reading import CUTS, cut, read
from tests.app.text.output.test_held_calls import END, SCHEMAS, compiler, takes, tokens_of

FORMATS = OutputFormats(Apertus, ApertusThink)
THOUGHT = "<|inner_prefix|>I add.<|inner_suffix|>"
CALLS = f'{APERTUS}[{{"add": {{"a": 1}}}}, {{"now": {{}}}}]{APERTUS_END}'
CALLED = [("add", {"a": 1}), ("now", {})]


@given(cuts=CUTS)
@settings(max_examples=25, deadline=None)
def test_reasoning_and_calls_in_any_cut(cuts: list[int]) -> None:
    answer = f"{THOUGHT}So: {CALLS}"
    assert read(FORMATS, cut(answer, cuts)) == ("So: ", "I add.", CALLED)
    assert read(FORMATS, list("Plain.")) == ("Plain.", "", [])


@pytest.mark.parametrize(
    ("listed", "text", "calls"),
    [
        ('[{"add": {"a": 1, "b"}}]', "Hm.", CALLED[:1]),
        ('[{"now": {}}, {"rm": {}}]', f', {{"rm": {{}}}}]{APERTUS_END}Hm.', CALLED[1:]),
    ],
)
def test_a_list_that_breaks_off_keeps_what_was_whole(
    listed: str, text: str, calls: list[tuple[str, object]]
) -> None:
    assert read(FORMATS, list(f"{APERTUS}{listed}{APERTUS_END}Hm.")) == (text, "", calls)


@pytest.mark.parametrize("special", [True, False])
def test_calls_are_held(special: bool) -> None:
    assert takes("apertus", f"So: {CALLS} Ok.", special=special)
    for refused in ("[]", '[{"rm"', '[{"add": {}}]', '[{"now": {}, "add"', "So."):
        assert not takes("apertus", f"{APERTUS}{refused}{APERTUS_END}", special=special)


def test_calls_that_have_to_be_made_are_the_familys_own() -> None:
    names = tuple(FORMATS.special_tokens(with_tools=True))
    frame = Frame(ApertusThink.marks(""), held=Apertus.forced(SCHEMAS), most_calls=2)

    def made(text: str) -> bool:
        matcher = compiler(names).compile("text", "", frame)()
        tokens = tokens_of(text, names)
        return all(map(matcher.take, tokens)) and (matcher.is_over or matcher.take(END))

    assert made(f"{THOUGHT}{CALLS}")
    assert made(CALLS)
    assert not any(map(made, ("So.", f"So: {CALLS}", '[{"now": {}}]')))
