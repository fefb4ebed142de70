"""Hunyuan: its templates, and answers between marks of their own behind the reasoning."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from app.text.output.hunyuan import Hunyuan, HunyuanThink, MiniMaxM1
from app.text.output.interface import ToolFormat
from app.text.output.pieces import gathered
from app.text.output.registry import OutputFormats, choose_formats
from app.text.output.thinking import Think
from tests.app.text.output.reading import CUTS, TOOLS, cut, read
from tests.app.text.output.test_held_calls import takes

FORMATS = OutputFormats(Hunyuan, HunyuanThink)
CALL = '{"name": "add", "arguments": {"a": 1}}'
NAMED = '<tool_call>add\n```json\n{"a": 1}\n```</tool_call>'
CALLS = '<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>'


@pytest.mark.parametrize("mark", ["<|extra_4|>", "<｜hy_Assistant｜>"])
def test_its_templates_show_both(mark: str) -> None:
    for call in ("", "<tool_call>name"):
        assert choose_formats([f"<tool_calls>{call}{mark}<think>\\n\\n</think>\\n"]) == FORMATS
    assert choose_formats([mark]).reasoning is None  # of a model that does not reason


@pytest.mark.parametrize(
    "shown", ['\\n{"name": <tool-name>', "\n{''name'': <tool-name-1>", '\\n{\\"name\\": ""']
)
def test_an_object_right_behind_the_mark_is_of_minimax(shown: str) -> None:
    template = f"{{{{ 'Respond with <tool_calls></tool_calls> as in\\n<tool_calls>{shown}' }}}}"
    assert choose_formats([template]).tools is MiniMaxM1
    for other in ("<tool_calls>[{'name'", "'<tool_calls>' }}{{ calls", "<tool_calls>{% for call"):
        assert choose_formats([other]).tools is Hunyuan


def test_a_prompt_that_asks_for_an_answer_between_marks_is_of_no_family() -> None:
    template = "Reason in <think></think>, then write <answer></answer>.\n<think>"
    assert choose_formats([template]).reasoning is Think


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("<think>\nHm.\n</think>\n<answer>\nHi.\n</answer>", ("Hi.", "Hm.", [])),
        ("<think>\nHm.\n</think>\nHi.", ("Hi.", "Hm.", [])),
        ("<answer>\nHi.\n\nYou.\n</answer>", ("Hi.\n\nYou.", "", [])),
        (
            "<answer>A <answer>b</answer> c\n</answer>\n</answer>",
            ("A <answer>b</answer> c\n</answer>", "", []),
        ),
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


def test_text_before_the_mark_of_an_end_is_not_held_back() -> None:
    parser = FORMATS.parser(TOOLS, is_forced=False, by_argument=True, in_reasoning=False)
    assert gathered(parser.push(["<answer>Close </answer> \n"]))[0] == "Close "
    assert gathered(parser.push(["<tool_cal"]))[0] == ""
    assert gathered(parser.push(["!"]))[0] == "</answer> \n<tool_cal!"


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("name", "taken", "refused"),
    [
        (
            "hunyuan",
            [
                f"So: <tool_calls>[{CALL}]</tool_calls> Ok.",
                f"<tool_calls>\n[\n{CALL},\n{CALL}\n]\n</tool_calls>",
                f"<tool_calls>\n[{CALL}, {CALL}]\n</tool_calls>",
                f"So: <tool_calls>{NAMED}\n{NAMED}</tool_calls> Ok.",
                f"<tool_calls>\n{NAMED}\n</tool_calls>",
                f"So: {NAMED} Ok.",
            ],
            [
                NAMED.replace("1", "x"),
                f"<tool_calls>{NAMED}",
                "<tool_calls><tool_call>add\n```json\n{}",
                "<tool_calls>\n[]",
                f"<tool_calls>\n{CALL}",
                f"<tool_calls>\n[{CALL}\n]",
            ],
        ),
        (
            "minimax_m1",
            [
                f"So: <tool_calls>\n{CALL}\n{CALL}\n</tool_calls> Ok.",
                f"<tool_calls>{CALL}</tool_calls>",
            ],
            [f"<tool_calls>\n[{CALL}]", f"<tool_calls>\n{CALL}", "<tool_calls>\n</tool_calls>"],
        ),
    ],
)
def test_calls_are_held_on_lines_of_their_own_or_not(
    name: str, taken: list[str], refused: list[str], special: bool
) -> None:
    assert [text for text in taken if not takes(name, text, special=special)] == []
    assert [text for text in refused if takes(name, text, special=special)] == []


def test_a_call_by_name_that_breaks_off_keeps_its_whole_arguments() -> None:
    answer = '<tool_calls><tool_call>add\n```json\n{"a": 1, "b"}\n```</tool_call></tool_calls>Hm.'
    assert read(FORMATS, list(answer)) == ("Hm.", "", [("add", {"a": 1})])


BAD_NAMED = [
    '<tool_call>add\n```json\n{"a": one}\n```</tool_call>',
    "<tool_call>rm\n```json\n{}\n```</tool_call>",
]
BAD_LINES = ['{"name": "add", "arguments": {"a": one}}', '{"name": "rm"}', '{"name": "add']
NOW = '{"name": "now", "arguments": {}}'
NAMED_NOW = "<tool_call>now\n```json\n{}\n```</tool_call>"


@pytest.mark.parametrize("by_argument", [False, True])
@pytest.mark.parametrize(
    ("tools", "bad", "calls"),
    [
        *((Hunyuan, bad, (NAMED, NAMED_NOW)) for bad in BAD_NAMED),
        *((MiniMaxM1, bad, (CALL, NOW)) for bad in BAD_LINES),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
@given(cuts=CUTS)
@settings(max_examples=10, deadline=None)
def test_calls_behind_a_malformed_one_are_found(
    tools: type[ToolFormat],
    bad: str,
    calls: tuple[str, str],
    place: int,
    by_argument: bool,
    cuts: list[int],
) -> None:
    written = "\n".join([*calls[:place], bad, *calls[place:]])
    answer = f"Yes.<tool_calls>\n{written}\n</tool_calls>"
    formats = OutputFormats(tools, None)
    for texts in (cut(answer, cuts), list(answer)):
        text, _, found = read(formats, texts, by_argument=by_argument)
        assert found == [("add", {"a": 1}), ("now", {})]
        assert text.startswith("Yes.")
        assert bad in text


@pytest.mark.parametrize(
    ("tools", "bad", "good"),
    [
        (Hunyuan, NAMED.replace("}", ', "b"}'), NAMED_NOW),
        (Hunyuan, '<tool_call>add\n```json\n{"a": 1,', NAMED_NOW),
        (MiniMaxM1, CALL.replace("1}", '1, "b"}'), NOW),
    ],
)
def test_so_are_calls_behind_one_that_was_sent_in_part(
    tools: type[ToolFormat], bad: str, good: str
) -> None:
    answer = f"<tool_calls>\n{bad}\n{good}\n</tool_calls>So."
    wanted = ("So.", "", [("add", {"a": 1}), ("now", {})])
    assert read(OutputFormats(tools, None), list(answer)) == wanted
