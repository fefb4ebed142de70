"""Calls and reasoning of Hunyuan 3, whose published weights have a suffix in each mark."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from app.text.output.hunyuan_v3 import HunyuanV3, HunyuanV3Open, HunyuanV3Think
from app.text.output.registry import OutputFormats, choose_formats
from app.text.output.thinking import Think
from tests.app.text.output.reading import CUTS, cut, read
from tests.app.text.output.test_held_calls import takes

KINDS = {"": HunyuanV3, ":opensource": HunyuanV3Open}
ADDED = ("add", {"a": 1, "b": "2"})
ADD = (
    "<tool_call>add<tool_sep>\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>"
    "\n<arg_value>2</arg_value>\n</tool_call>"
)
RM, NOW = "<tool_call>rm<tool_sep>\n</tool_call>", "<tool_call>now</tool_call>"


def marked(text: str, suffix: str) -> str:
    for name in ("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value", "think"):
        text = text.replace(f"{name}>", f"{name}{suffix}>")
    return text


def test_templates_show_the_suffix() -> None:
    begin = "{{ '<think' ~ kind ~ '>' }}{{ '<tool_calls' ~ kind ~ '>' }}{{ '<tool_sep' ~ kind }}"
    with_suffix = choose_formats([f"{{% set kind = ':opensource' %}}{begin}"])
    assert with_suffix == OutputFormats(HunyuanV3Open, HunyuanV3Think)
    plain = choose_formats(["<think><tool_calls><tool_call><tool_sep><arg_key>"])
    assert plain == OutputFormats(HunyuanV3, Think)


@pytest.mark.parametrize("suffix", KINDS)
@pytest.mark.parametrize(
    ("answer", "text", "calls"),
    [
        (f"So:<tool_calls>\n{ADD}\n{NOW}\n</tool_calls>Ok.", "So:Ok.", [ADDED, ("now", {})]),
        (f"{ADD}{ADD} Ok.", "Ok.", [ADDED, ADDED]),  # without the marks of all
        (ADD.replace("<tool_sep>", "").replace("\n", ""), "", [ADDED]),
        (f"<tool_calls>{RM}{ADD}</tool_calls>", f"<tool_calls>{RM}", [ADDED]),
        (f"<tool_calls>{ADD}{RM}{ADD}</tool_calls>.", f"{RM}.", [ADDED, ADDED]),
        ("<tool_calls>now</tool_calls>", "<tool_calls>now</tool_calls>", []),
        (f"<tool_calls>{ADD}</tool_ca", "", [ADDED]),
    ],
)
@given(cuts=CUTS)
@settings(max_examples=10, deadline=None)
def test_calls_are_read_in_any_cut(
    answer: str, text: str, calls: list[object], suffix: str, cuts: list[int]
) -> None:
    formats = OutputFormats(KINDS[suffix], HunyuanV3Think if suffix else Think)
    answer = marked(f"I add.</think>{answer}", suffix)
    for chunks in (cut(answer, cuts), list(answer)):
        for by_argument in (False, True):
            found = read(formats, chunks, by_argument=by_argument, in_reasoning=True)
            assert found == (marked(text, suffix), "I add.", calls)


def test_a_call_without_its_end_takes_no_other_along() -> None:
    formats = OutputFormats(HunyuanV3, None)
    begun = ADD.removesuffix("</tool_call>")
    answer = f"<tool_calls>{begun}{ADD}{ADD}</tool_calls>"
    found = read(formats, [answer], by_argument=False)
    assert found == (f"<tool_calls>{begun}", "", [ADDED, ADDED])
    assert read(formats, list(answer)) == ("", "", [ADDED, ADDED, ADDED])


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("suffix", "name"), [("", "hunyuan_v3"), (":opensource", "hunyuan_v3_open")]
)
def test_a_held_call_has_its_marks_and_its_schema(suffix: str, name: str, special: bool) -> None:
    now = "<tool_call>now<tool_sep>\n</tool_call>"
    for taken in (f"<tool_calls>\n{ADD}\n{now}\n</tool_calls> Ok.", f"So: {ADD}"):
        assert takes(name, marked(taken, suffix), special=special)
    for refused in (RM, NOW, ADD.replace("1", "x"), ADD.replace("<tool_sep>", "")):
        written = f"<tool_calls>\n{refused}\n</tool_calls>"
        assert not takes(name, marked(written, suffix), special=special)
