"""Step3: its template, and calls that break off."""

from __future__ import annotations

import pytest

from app.text.output.registry import OutputFormats, choose_formats
from app.text.output.step3 import Step3
from app.text.output.thinking import Think
from tests.app.text.output.answers_by_name import STEP, STEP_A, STEP_END, STEP_ONE
from tests.app.text.output.reading import read
from tests.app.text.output.test_held_calls import takes

FORMATS = OutputFormats(Step3, Think)


def test_its_template_shows_both() -> None:
    assert choose_formats(["<steptml:invoke name='x'>", "<think>"]) == FORMATS


def test_reasoning_and_a_call_that_breaks_off() -> None:
    begun = f'I add.\n</think>\n{STEP}\n{STEP_ONE}add">\n{STEP_A}'
    whole = f"{begun}{STEP_END}\n<｜tool_calls_end｜>"
    for answer in (whole, whole[:-5], begun):
        found = read(FORMATS, list(answer), in_reasoning=True)
        assert found == ("", "I add.", [("add", {"a": 1})])


@pytest.mark.parametrize("special", [True, False])
def test_a_held_call_has_its_marks(special: bool) -> None:
    call = f'{STEP_ONE}add">\n{STEP_A}{STEP_END}'
    assert takes("step3", f"So:{STEP}\n{call}\n{call}\n<｜tool_calls_end｜> Ok.", special=special)
    for refused in (STEP_END, "<｜tool_call_end｜>", 'a">1', "<｜tool_calls_end｜>"):
        written = f"{STEP}\n{call}\n<｜tool_calls_end｜>".replace(refused, "")
        assert not takes("step3", written, special=special)
