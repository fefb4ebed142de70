"""ERNIE 4.5: its template, and answers between marks of their own behind the reasoning."""

from __future__ import annotations

import pytest

from app.text.output.ernie import ErnieThink
from app.text.output.hermes import Hermes
from app.text.output.registry import OutputFormats, choose_formats
from tests.app.text.output.reading import read

FORMATS = OutputFormats(Hermes, ErnieThink)
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def test_its_template_shows_both() -> None:
    template = "<global_setting>\\nthink_mode=True\\n</global_setting><tool_call>\\n<think>\\n"
    assert choose_formats([template]) == FORMATS


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("Hm.\n</think>\n\n<response>\nHi.\n\nYou.\n</response>", ("Hi.\n\nYou.", "Hm.", [])),
        ("Hm.\n</think>\nHi.", ("Hi.", "Hm.", [])),
        (  # marks that are text within the answer
            "Hm.\n</think>\n\n<response>\n<a>\n</response>\n</a> and </response>.\n</response>\n\n"
            f"{CALL}",
            ("<a>\n</response>\n</a> and </response>.\n\n", "Hm.", [("now", {})]),
        ),
        (
            "Hm.</think><response>A </response> <tool_cal </response> <tool_c",
            ("A </response> <tool_cal </response> <tool_c", "Hm.", []),
        ),
        (
            f"Hm.\n</think>\n\n\n{CALL}\n",
            ("", "Hm.", [("now", {})]),
        ),
    ],
)
def test_the_marks_around_the_answer_are_left_out(
    answer: str, found: tuple[str, str, list[tuple[str, object]]]
) -> None:
    assert read(FORMATS, list(answer), in_reasoning=True) == found
    assert read(FORMATS, [answer], in_reasoning=True) == found
