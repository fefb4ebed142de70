"""Hunyuan: its templates, and answers between marks of their own behind the reasoning."""

from __future__ import annotations

import pytest

from app.text.output.hunyuan import Hunyuan, HunyuanThink
from app.text.output.registry import OutputFormats, choose_formats
from app.text.output.thinking import Think
from tests.app.text.output.reading import read

FORMATS = OutputFormats(Hunyuan, HunyuanThink)
CALLS = '<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>'


@pytest.mark.parametrize("mark", ["<|extra_4|>", "<｜hy_Assistant｜>"])
def test_its_templates_show_both(mark: str) -> None:
    assert choose_formats([f"<tool_calls>{mark}<think>\\n\\n</think>\\n"]) == FORMATS
    assert choose_formats([mark]).reasoning is None  # of a model that does not reason


def test_a_prompt_that_asks_for_an_answer_between_marks_is_of_no_family() -> None:
    template = "Reason in <think></think>, then write <answer></answer>.\n<think>"
    assert choose_formats([template]).reasoning is Think


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("<think>\nHm.\n</think>\n<answer>\nHi.\n</answer>", ("Hi.", "Hm.", [])),
        ("<think>\nHm.\n</think>\nHi.", ("Hi.", "Hm.", [])),
        ("<answer>\nHi.\n\nYou.\n</answer>", ("Hi.\n\nYou.", "", [])),
        (" So <answer>x</answer>", (" So <answer>x</answer>", "", [])),
        (f"<think>Hm.</think>\n<answer>\n{CALLS}\n</answer>", ("", "Hm.", [("now", {})])),
        (f"<think>Hm.</think>{CALLS}", ("", "Hm.", [("now", {})])),
    ],
)
def test_the_marks_around_the_answer_are_left_out(
    answer: str, found: tuple[str, str, list[tuple[str, object]]]
) -> None:
    assert read(FORMATS, list(answer)) == found
    assert read(FORMATS, [answer]) == found


def test_a_list_that_breaks_off_keeps_the_calls_before() -> None:
    answer = '<tool_calls>[{"name": "add", "arguments": {"a": 1, "b"}}]</tool_calls>Hm.'
    assert read(FORMATS, list(answer)) == ("Hm.", "", [("add", {"a": 1})])
