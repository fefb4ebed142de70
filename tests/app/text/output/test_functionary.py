"""Functionary: its template, and what a grammar holds."""

from __future__ import annotations

import pytest

from app.text.output.functionary import Functionary
from app.text.output.qwen3_coder import Qwen3Coder
from app.text.output.registry import OutputFormats, choose_formats
from tests.app.text.output.reading import read
from tests.app.text.output.test_held_calls import takes


def test_a_template_with_json_behind_the_tag_is_its_own() -> None:
    shown = '<function=example_function_name>{"example_name": "example_value"}</function>'
    assert choose_formats([shown]).tools is Functionary
    for other in ("<function=f>\n<parameter=x>", "<tool_call>\n<function=f>"):
        assert choose_formats([other]).tools is Qwen3Coder


def test_a_streamed_call_that_breaks_off_keeps_its_whole_arguments() -> None:
    answer = '<function=add>{"a": 1, "b"}</function>Hm.<function=now>{}</function>'
    found = read(OutputFormats(Functionary, None), list(answer))
    assert found == ("Hm.", "", [("add", {"a": 1}), ("now", {})])


@pytest.mark.parametrize("special", [True, False])
def test_calls_are_held(special: bool) -> None:
    taken = 'So: <function=add>{"a": 1}</function><function=now>{}</function> Ok.'
    assert takes("functionary", taken, special=special)
    for refused in ("<function=add>{}</function>", "<function=rm", '<function=add>{"a": 1} so'):
        assert not takes("functionary", refused, special=special)
