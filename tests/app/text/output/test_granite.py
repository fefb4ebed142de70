"""Calls of Granite 3: the list ends the answer, complete or not."""

from __future__ import annotations

from app.text.output.granite import Granite
from app.text.output.registry import OutputFormats
from tests.app.text.output.reading import read

FORMATS = OutputFormats(Granite, None)


def test_a_list_without_its_end_holds_its_calls() -> None:
    answer = (
        '<|tool_call|>[{"name": "now", "arguments": {}}, {"name": "add", "arguments": {"a": 1}}'
    )
    assert read(FORMATS, list(answer)) == ("", "", [("now", {}), ("add", {"a": 1})])


def test_what_follows_the_mark_is_text_unless_it_is_a_list() -> None:
    answer = '<|tool_call|>{"name": "now", "arguments": {}}'
    assert read(FORMATS, list(answer)) == (answer, "", [])
