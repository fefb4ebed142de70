"""Templates of DeepSeek, and a streamed call that breaks off."""

from __future__ import annotations

import pytest

from app.text.output.deepseek import DeepSeekV3, DeepSeekV31
from app.text.output.registry import OutputFormats, choose_formats
from app.text.output.thinking import Think
from tests.app.text.output.answers_between_marks import DS_ALL, DS_ALL_END, DS_END, DS_ONE, DS_SEP
from tests.app.text.output.reading import TOOLS, read

V3 = f"""{DS_ALL}{DS_ONE}' + tool['type'] + '{DS_SEP}' + tool['function']['name'] + '\\n' +
'```json' + '\\n' + tool['function']['arguments'] + '\\n' + '```' + '{DS_END}"""
V31 = f"</think>{DS_ALL}{DS_ONE}' + tool['function']['name'] + '{DS_SEP}' + arguments + '{DS_END}"


def test_a_template_shows_in_which_form_it_calls() -> None:
    assert choose_formats([V3]).tools is DeepSeekV3
    found = choose_formats([V31])
    assert (found.tools, found.reasoning) == (DeepSeekV31, Think)


@pytest.mark.parametrize("form", [DeepSeekV3, DeepSeekV31])
def test_each_reads_the_other_form(form: type[DeepSeekV31]) -> None:
    for written in (DeepSeekV3, DeepSeekV31):
        answer = written.written([("now", {}), ("add", {"a": 1})])
        assert read(OutputFormats(form, None), list(answer))[2] == [("now", {}), ("add", {"a": 1})]


def test_a_call_behind_one_that_breaks_off_is_read() -> None:
    answer = (
        f'{DS_ALL}{DS_ONE}add{DS_SEP}{{"a": 1, "b"}}{DS_END}'
        f"{DS_ONE}now{DS_SEP}{{}}{DS_END}{DS_ALL_END}"
    )
    formats = OutputFormats(DeepSeekV31, None)
    assert read(formats, list(answer)) == ("", "", [("add", {"a": 1}), ("now", {})])
    parser = formats.parser(TOOLS, is_forced=False, by_argument=True, in_reasoning=False)
    parser.push(list(answer))
    parser.finish()
    assert parser.cut_calls == {0}
