"""Calls and reasoning of PLaMo 3, whose marks are several tokens each."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from app.text.output.plamo3 import Plamo3, Plamo3Think
from app.text.output.registry import OutputFormats, choose_formats
from tests.app.text.output.reading import CUTS, Read, cut, read
from tests.app.text.output.test_held_calls import takes

FORMATS = OutputFormats(Plamo3, Plamo3Think)
BEGIN, END = "<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>"
THOUGHT = "<|plamo:begin_think:plamo|>I add.<|plamo:end_think:plamo|>"
ONE_END = "<|plamo:end_tool_request:plamo|>"
JSON = "<|plamo:constrain|>json<|plamo:msg|>"
ADDED = ("add", {"a": 1})


def call(arguments: str, name: str = "add", before: str = JSON) -> str:
    return (
        "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>"
        f"{name}<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|>{before}"
        f"{arguments}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
    )


ADD = call('{"a": 1}')


def test_its_template_shows_both() -> None:
    assert choose_formats([f"{THOUGHT}{BEGIN}"]) == FORMATS


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (f"{THOUGHT}So:{BEGIN}{ADD}{ADD}{END}", ("So:", "I add.", [ADDED, ADDED])),
        (f"So:{ADD}Hm.", ("So:Hm.", "", [ADDED])),  # without the marks of all
        (f"{BEGIN}\n{call('{}', 'now', '')}\n{END[:9]}", ("", "", [("now", {})])),
        (f"{BEGIN}{call('{}', 'now', '<|plamo:msg|>')}{END}.", (".", "", [("now", {})])),
        (f"{BEGIN}{ADD[:-30]}", ("", "", [ADDED])),
        (f"{BEGIN}{ADD.removesuffix(ONE_END)}{ADD}{END}", ("", "", [ADDED, ADDED])),
        (f"{BEGIN}{call('{}', 'rm')}{ADD}{END}", (f"{BEGIN}{call('{}', 'rm')}", "", [ADDED])),
        (f"{BEGIN}{ADD}{call('[1]')}{ADD}{END}", (call("[1]"), "", [ADDED, ADDED])),
        (f"{BEGIN}{END}", (f"{BEGIN}{END}", "", [])),
        ("<|plamo:begin_think:plamo|>cut off<|plamo:en", ("", "cut off<|plamo:en", [])),
    ],
)
@given(cuts=CUTS)
@settings(max_examples=25, deadline=None)
def test_requests_are_read_in_any_cut(answer: str, wanted: Read, cuts: list[int]) -> None:
    for chunks in (cut(answer, cuts), list(answer)):
        assert read(FORMATS, chunks, by_argument=False) == wanted
        assert read(FORMATS, chunks) == wanted


def test_a_streamed_call_that_breaks_off_keeps_its_whole_arguments() -> None:
    broken = call('{"a": 1, "b": }')
    answer = f"{BEGIN}{broken}{ADD}{END}Hm."
    assert read(FORMATS, list(answer)) == ("Hm.", "", [ADDED, ADDED])


@pytest.mark.parametrize("special", [True, False])
def test_a_held_call_has_its_marks_and_its_schema(special: bool) -> None:
    for taken in (
        f"{BEGIN}{ADD}{ADD}{END}",
        f"So: {ADD}",
        f"{BEGIN}{call('{}', 'now', JSON)}{END}",
    ):
        assert takes("plamo3", taken, special=special)
    no_json = call('{"a": 1}', "add", "<|plamo:msg|>")
    assert takes("plamo3", f"{BEGIN}{no_json}{END}", special=special)
    for refused in (call('{"a": "x"}'), call("{}", "rm"), call('{"a": 1}', "add", ""), BEGIN):
        assert not takes("plamo3", f"{BEGIN}{refused}{END}", special=special)
