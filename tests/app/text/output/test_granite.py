"""Granite 3: a list of calls ends the answer, complete or not; it reasons where it is asked to."""

from __future__ import annotations

from app.text.chat_template import ChatTemplate
from app.text.output.granite import Granite
from app.text.output.registry import OutputFormats
from app.text.output.thinking import GraniteThink
from tests.app.text.families import GRANITE_3
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


def test_an_answer_in_a_format_has_reasoning_before_it_if_the_prompt_asks_for_it() -> None:
    template = ChatTemplate({"default": GRANITE_3}, {}, limit_s=5)
    for variables, marks in (({}, ()), ({"thinking": True}, ("<think>", "</think>"))):
        prompt = template.render([{"role": "user", "content": "Hi"}], variables=variables)
        assert GraniteThink.marks(prompt) == marks
    template.close()
