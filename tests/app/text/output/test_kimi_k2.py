"""Ids of Kimi K2, and its templates."""

from __future__ import annotations

import pytest

from app.text.output.kimi_k2 import KimiK2
from app.text.output.registry import OutputFormats, choose_formats
from tests.app.text.output.answers_between_marks import KIMI_ALL, KIMI_END, KIMI_SEP
from tests.app.text.output.reading import TOOLS, read
from tests.app.text.output.test_held_calls import takes

FORMATS = OutputFormats(KimiK2, None)


def test_both_templates_are_known() -> None:
    calls = f"{KIMI_ALL}<|tool_call_begin|>{{{{ id }}}}{KIMI_SEP}"
    for template in (calls, "<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}"):
        assert choose_formats([template]).tools is KimiK2


@pytest.mark.parametrize("tool", ["functions.add", "add:1", "add.all"])
def test_a_name_that_looks_like_an_id_is_a_name(tool: str) -> None:
    tools = {**TOOLS, tool: {}}
    parser = FORMATS.parser(tools, is_forced=False, by_argument=True, in_reasoning=False)
    parser.push(list(KimiK2.written([(tool, {})])))
    assert parser.num_calls == 1


def test_ids_count_up() -> None:
    written = KimiK2.written([("now", {}), ("add", {"a": 1})])
    assert "functions.now:0" in written
    assert "functions.add:1" in written
    assert takes("kimi_k2", written.replace(":1", ":17"), special=True)
    assert not takes("kimi_k2", written.replace(":1", ":x"), special=True)


def test_a_call_behind_one_that_breaks_off_is_read() -> None:
    answer = (
        f'{KIMI_ALL}<|tool_call_begin|>add:0{KIMI_SEP}{{"a": 1, "b"}}{KIMI_END}'
        f"<|tool_call_begin|>now:1{KIMI_SEP}{{}}{KIMI_END}"
    )
    assert read(FORMATS, list(answer)) == ("", "", [("add", {"a": 1}), ("now", {})])
