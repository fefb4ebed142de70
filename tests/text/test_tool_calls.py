from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.text.tool_calls import CallDelta, ToolCallParser, ToolFormat

CALL = '{"name": "add", "arguments": {"a": 1, "b": "x}\\"{"}}'
Parsed = tuple[str, list[tuple[str, str]]]


def parse(form: ToolFormat, pieces: list[str]) -> Parsed:
    parser = ToolCallParser(form, ["add", "f"])
    text = ""
    deltas: list[CallDelta] = []
    for piece in pieces:
        shown, found = parser.push(piece)
        text += shown
        deltas += found
    shown, found = parser.finish()
    calls: list[tuple[str, str]] = []
    for delta in [*deltas, *found]:
        if delta.name is not None:
            assert delta.index == len(calls)
            calls.append((delta.name, delta.arguments))
        else:
            calls[delta.index] = (calls[delta.index][0], calls[delta.index][1] + delta.arguments)
    assert parser.num_calls == len(calls)
    return text + shown, calls


@example([88])  # between a closing tag and the line end behind it
@given(st.lists(st.integers(0, 200), max_size=12))
def test_any_split_finds_the_same_calls(cuts: list[int]) -> None:
    whole = f"Let me see.<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>Done."
    cuts = sorted(min(cut, len(whole)) for cut in cuts)
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    text, calls = parse(ToolFormat.TAGGED, pieces)
    assert text == "Let me see.Done."
    assert calls == [("add", '{"a": 1, "b": "x}\\"{"}')] * 2


MALFORMED = [
    "no call",
    "a < b <tool",
    "<tool_call>not json</tool_call>",
    '<tool_call>{"arguments": {}}</tool_call>',
    '<tool_call>{"name": 3}</tool_call>',
    '<tool_call>{"nam',
    '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": one}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>',
    '<tool_call>{"name": "add", "arguments": "a, b"}</tool_call>',
    f"<tool_call>{CALL}}}</tool_call>",
    f"<tool_call>{CALL} and so on",
    f"<tool_call>{CALL[:-1]}",
    f"<tool_call>{CALL[:12]}<tool",
]


@pytest.mark.parametrize("given_text", MALFORMED)
@given(cuts=st.lists(st.integers(0, 80), max_size=6))
@settings(max_examples=20)
def test_what_is_no_call_of_a_declared_tool_is_text(given_text: str, cuts: list[int]) -> None:
    cuts = sorted(min(cut, len(given_text)) for cut in cuts)
    pieces = [given_text[a:b] for a, b in zip([0, *cuts], [*cuts, len(given_text)], strict=True)]
    assert parse(ToolFormat.TAGGED, pieces) == (given_text, [])
    whole = f"<tool_call>{CALL}</tool_call>"
    text, calls = parse(ToolFormat.TAGGED, [whole, *pieces])
    assert (text, calls) == (given_text, [("add", '{"a": 1, "b": "x}\\"{"}')])


def test_a_call_is_found_behind_one_that_breaks_off() -> None:
    broken = '<tool_call>{"name": "add" '
    assert parse(ToolFormat.TAGGED, list(f"{broken}<tool_call>{CALL}</tool_call>")) == (
        broken,
        [("add", '{"a": 1, "b": "x}\\"{"}')],
    )


@pytest.mark.parametrize("end", ["", "\n", "</tool", "</tool_call>"])
def test_the_end_of_the_text_closes_a_whole_call(end: str) -> None:
    text, calls = parse(ToolFormat.TAGGED, list(f"<tool_call>{CALL}{end}"))
    assert (text, len(calls)) == ("", 1)


@pytest.mark.parametrize(
    "given_text",
    [CALL, f"[{CALL}]", f"[{CALL}, {CALL}]", f" [ {CALL}\n,{CALL} ] "],
)
def test_plain_json(given_text: str) -> None:
    text, calls = parse(ToolFormat.JSON, list(given_text))
    assert text == ""
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        ("add", {"a": 1, "b": 'x}"{'})
    ] * given_text.count("name")


def test_arguments_before_the_name_wait_for_it() -> None:
    text, calls = parse(ToolFormat.JSON, list('{"arguments": {"a": [1]}, "name": "f"}'))
    assert (text, calls) == ("", [("f", '{"a": [1]}')])


def test_arguments_written_as_a_string_or_left_out() -> None:
    assert parse(ToolFormat.JSON, ['{"name":"f","arguments":"{\\"a\\":1}"}']) == (
        "",
        [("f", '{"a":1}')],
    )
    assert parse(ToolFormat.JSON, ['{"name":"f","arguments":null}']) == ("", [("f", "{}")])


def test_arguments_behind_a_grammar_stream_while_they_arrive() -> None:
    parser = ToolCallParser(ToolFormat.JSON, ["f"])
    parser.push('{"name": "f", "arguments": ')
    assert parser.push('{"a"')[1] == [CallDelta(0, None, '{"a"')]
