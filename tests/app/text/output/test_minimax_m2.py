"""MiniMax-M2: names in attributes, its template, and a streamed call that breaks off."""

from __future__ import annotations

import json

from app.text.output.minimax_m2 import MiniMaxM2
from app.text.output.registry import OutputFormats, choose_formats
from app.text.output.thinking import Think
from tests.app.text.output.reading import read
from tests.app.text.output.test_held_calls import takes

FORMATS = OutputFormats(MiniMaxM2, Think)
BEGUN = '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
END = "</invoke>\n</minimax:tool_call>"


def test_its_template_shows_both() -> None:
    template = "{%- set begin = '<minimax:tool_call>' -%}]~b]ai\\n<think>\\n"
    assert choose_formats([template]) == FORMATS


def test_reasoning_and_a_call() -> None:
    found = read(FORMATS, list(f"I add.\n</think>\n\n{BEGUN}{END}"), in_reasoning=True)
    assert found == ("", "I add.", [("add", {"a": 1})])


def test_a_streamed_call_that_breaks_off_keeps_its_whole_arguments() -> None:
    assert read(FORMATS, list(f"{BEGUN}<parameter>x{END}Hm.")) == ("Hm.", "", [("add", {"a": 1})])
    assert read(FORMATS, list(f"{BEGUN}x</invoke>Hm.")) == ("Hm.", "", [("add", {"a": 1})])


def test_a_name_may_hold_quotation_marks() -> None:
    given = [("add", {'a"b': 1})]
    schema = json.dumps({"type": "object", "properties": {'a"b': {"type": "integer"}}})
    written = MiniMaxM2.written(given)
    assert takes("minimax_m2", written, special=True, schemas={"add": schema})
    assert read(FORMATS, list(written)) == ("", "", given)


def test_a_held_call_has_its_required_parameters_once() -> None:
    assert takes("minimax_m2", BEGUN + END, special=False)
    again = '<parameter name="a">1</parameter>\n'
    assert not takes("minimax_m2", BEGUN + again + END, special=False)
    assert not takes("minimax_m2", BEGUN.replace(again, "") + END, special=False)
