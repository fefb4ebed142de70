"""OLMo 3: its template, and calls that break off or are held."""

from __future__ import annotations

import pytest

from app.text.output.olmo3 import Olmo3
from app.text.output.registry import OutputFormats, choose_formats
from tests.app.text.output.reading import read
from tests.app.text.output.test_held_calls import takes

FORMATS = OutputFormats(Olmo3, None)
END = "</function_calls>"


def test_its_template_shows_it() -> None:
    template = "<|im_start|>system\\n<functions></functions>{{ '<function_calls>' + calls }}"
    assert choose_formats([template]) == FORMATS


def test_a_streamed_call_that_breaks_off_keeps_its_whole_arguments() -> None:
    answer = f"<function_calls>now()\nadd(a=1, b=c)\n{END}Hm."
    assert read(FORMATS, list(answer)) == ("Hm.", "", [("now", {}), ("add", {"a": 1})])


@pytest.mark.parametrize("special", [True, False])
def test_calls_between_the_marks_are_held(special: bool) -> None:
    for taken in ("add()", f"<function_calls>add(a=1){END}", f"<function_calls>\nnow()\n{END}Hm."):
        assert takes("olmo3", taken, special=special)
    for value in ("true", "null", "[true, None, {'k': [null]}]", '"true"'):
        taken = f"<function_calls>\nplot(style={value})\n{END}"
        assert takes("olmo3", taken, special=special)
        assert len(read(FORMATS, list(taken))[2][0][1]) == 1
    for value in ("true", "False"):
        assert takes("olmo3", f"<function_calls>\nplot(grid={value})\n{END}", special=special)
        assert not takes("olmo3", f"<function_calls>add(a={value})\n{END}", special=special)
    for refused in ("add()", "rm()", "add(a=1)", f"add(a='x')\n{END}", f"add(a=1)now(){END}"):
        assert not takes("olmo3", f"<function_calls>\n{refused}", special=special)
