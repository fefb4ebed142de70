"""Seed-OSS: its template, its reasoning, and a streamed call that breaks off."""

from __future__ import annotations

import pytest

from app.text.output.registry import choose_formats
from app.text.output.seed_oss import SeedOss, SeedThink
from tests.app.text.output.reading import read
from tests.app.text.output.test_held_calls import takes

TEMPLATE = "{%- set a = '<seed:tool_call>' -%}{%- set b = '<seed:think>' -%}\\n<function=f>\\n"
FORMATS = choose_formats([TEMPLATE])
BEGUN = "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n"


def test_its_template_shows_both() -> None:
    assert (FORMATS.tools, FORMATS.reasoning) == (SeedOss, SeedThink)


def test_reasoning_and_a_call() -> None:
    answer = f"<seed:think>I add.</seed:think>\n{BEGUN}</function>\n</seed:tool_call>"
    assert read(FORMATS, list(answer)) == ("", "I add.", [("add", {"a": 1})])


@pytest.mark.parametrize("end", ["<seed:think>", "<seed:think><seed:cot_budget_reflect>\n"])
def test_a_prompt_may_begin_the_reasoning(end: str) -> None:
    assert SeedThink.begins_in(f"<seed:bos>assistant\n{end}")
    assert not SeedThink.begins_in("<seed:bos>assistant\n")
    found = read(FORMATS, ["None.</seed:think>Hi."], in_reasoning=True)
    assert found == ("Hi.", "None.", [])


def test_a_streamed_call_that_breaks_off_keeps_its_whole_arguments() -> None:
    answer = f"{BEGUN}<parameter=b>x</function>\n</seed:tool_call>Hm."
    assert read(FORMATS, list(answer)) == ("Hm.", "", [("add", {"a": 1})])


def test_a_held_call_has_no_line_ends_around_a_number() -> None:
    end = "</function>\n</seed:tool_call>"
    assert takes("seed_oss", f"{BEGUN}<parameter=b>\nx\n</parameter>\n{end}", special=True)
    assert not takes("seed_oss", f"{BEGUN}<parameter=a>1</parameter>\n{end}", special=True)
