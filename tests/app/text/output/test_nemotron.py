"""Nemotron: its templates, its reasoning, and a streamed call that breaks off."""

from __future__ import annotations

from app.text.output.nemotron import Nemotron
from app.text.output.qwen3_coder import Qwen3Coder
from app.text.output.registry import OutputFormats, choose_formats
from app.text.output.thinking import Think
from tests.app.text.output.reading import read

TEMPLATE = "{{ '<TOOLCALL>[' + calls + ']</TOOLCALL>' }}{{ '<think>\n\n' }}"
BEGUN = '<TOOLCALL>[{"name": "add", "arguments": {"a": 1'
FORMATS = choose_formats([TEMPLATE])


def test_its_templates_show_what_each_writes() -> None:
    assert OutputFormats(Nemotron, Think) == FORMATS
    third = "{{ '<tool_call>\n<function=' + name }}{{ '<think></think>' }}"
    assert choose_formats([third]) == OutputFormats(Qwen3Coder, Think)


def test_reasoning_that_the_prompt_has_begun_and_a_call() -> None:
    assert Think.begins_in("<SPECIAL_11>Assistant\n<think>\n\n")
    assert not Think.marks("<SPECIAL_11>Assistant\n<think></think>")
    answer = f"I add.\n</think>\n\n{BEGUN}}}}}]</TOOLCALL>"
    assert read(FORMATS, list(answer), in_reasoning=True) == ("", "I add.", [("add", {"a": 1})])


def test_a_streamed_call_that_breaks_off_keeps_its_whole_arguments() -> None:
    answer = f'{BEGUN}, "b": }}]</TOOLCALL>Hm.'
    assert read(FORMATS, list(answer)) == ("Hm.", "", [("add", {"a": 1})])
