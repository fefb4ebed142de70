"""InternLM: what a grammar holds, between text and behind it."""

from __future__ import annotations

import pytest

from app.text.output.internlm import InternLM
from app.text.output.registry import OutputFormats, choose_formats
from tests.app.text.output.answers_by_name import ACTION, ACTION_END
from tests.app.text.output.reading import read
from tests.app.text.output.test_held_calls import takes

ADD = '{"name": "add", "parameters": {"a": 1}}'


def test_a_template_that_shows_a_mark_is_its_own() -> None:
    for template in ("{{ '<|im_start|>environment name=<|plugin|>' }}", "<|action_start|>"):
        assert choose_formats([template]).tools is InternLM


def test_a_streamed_call_that_breaks_off_keeps_its_whole_arguments() -> None:
    answer = f"{ACTION}{ADD.replace('1}', '1, }')}{ACTION_END}Hm.{ACTION}{ADD}{ACTION_END}"
    found = read(OutputFormats(InternLM, None), list(answer))
    assert found == ("Hm.", "", [("add", {"a": 1})] * 2)


@pytest.mark.parametrize("special", [True, False])
def test_calls_are_held(special: bool) -> None:
    for taken in (f"So: {ACTION}\n{ADD}{ACTION_END} Ok.", f"{ACTION}{ADD}{ACTION_END}"):
        assert takes("internlm", taken, special=special)
    for refused in (
        "<|action_start|><|interpreter|>",
        f'{ACTION}{{"name": "rm"',
        f'{ACTION}\n{{"name": "add", "parameters": {{}}',
        f"{ACTION}{ADD}",
    ):
        assert not takes("internlm", refused, special=special)
