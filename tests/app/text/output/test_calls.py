"""Every format of tool calls: what is one, what is none, and that the text's cut is nothing."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.text.output.pieces import MOST_MISREAD, CallDelta, gathered
from app.text.output.registry import TOOL_FORMATS, OutputFormats
from tests.app.text.output.answers import ADD, MALFORMED, NOW, PLOT, WELL_FORMED
from tests.app.text.output.answers_between_marks import (
    MALFORMED_BETWEEN_MARKS,
    WELL_FORMED_BETWEEN_MARKS,
)
from tests.app.text.output.answers_between_tags import (
    MALFORMED_BETWEEN_TAGS,
    WELL_FORMED_BETWEEN_TAGS,
)
from tests.app.text.output.answers_by_name import MALFORMED_BY_NAME, WELL_FORMED_BY_NAME
from tests.app.text.output.reading import CUTS, TOOLS, cut, pieces_of, read

WELL_FORMED = [
    *WELL_FORMED,
    *WELL_FORMED_BETWEEN_MARKS,
    *WELL_FORMED_BETWEEN_TAGS,
    *WELL_FORMED_BY_NAME,
]
MALFORMED = [
    *MALFORMED,
    *MALFORMED_BETWEEN_MARKS,
    *MALFORMED_BETWEEN_TAGS,
    *MALFORMED_BY_NAME,
]
FORMATS = {name: OutputFormats(one, None) for name, one in TOOL_FORMATS.items()}
GLM_BEGUN = "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>"
BEGUN = "<function=add><parameter=a>1</parameter>"


@pytest.mark.parametrize("by_argument", [False, True])
@pytest.mark.parametrize(("name", "answer", "text", "calls"), WELL_FORMED)
@given(cuts=CUTS)
@settings(max_examples=25, deadline=None)
def test_calls_are_found_in_any_cut(
    name: str,
    answer: str,
    text: str,
    calls: list[tuple[str, Any]],
    by_argument: bool,
    cuts: list[int],
) -> None:
    wanted = (text, "", calls)
    assert read(FORMATS[name], cut(answer, cuts), by_argument=by_argument) == wanted
    assert read(FORMATS[name], list(answer), by_argument=by_argument) == wanted


@pytest.mark.parametrize(("name", "answer", "text", "calls"), WELL_FORMED)
def test_arguments_go_out_as_each_is_whole(
    name: str, answer: str, text: str, calls: list[tuple[str, Any]]
) -> None:
    deltas = [
        piece
        for piece in pieces_of(FORMATS[name], list(answer), by_argument=True)
        if isinstance(piece, CallDelta)
    ]
    for index, (_, arguments) in enumerate(calls):
        parts = [delta.arguments for delta in deltas if delta.index == index]
        at_once = '"{\\"' in answer or '{"arguments"' in answer  # as one value, or before the name
        assert at_once or len(parts) >= len(arguments)
    order = [delta.index for delta in deltas]
    assert order == sorted(order)


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("calls", [[NOW], [ADD, NOW, PLOT]], ids=len)
def test_a_format_reads_what_it_writes(name: str, calls: list[tuple[str, Any]]) -> None:
    assert read(FORMATS[name], list(TOOL_FORMATS[name].written(calls))) == ("", "", calls)


@pytest.mark.parametrize(("name", "answer"), MALFORMED)
@given(cuts=CUTS)
@settings(max_examples=10, deadline=None)
def test_what_is_no_call_of_a_declared_tool_is_text(
    name: str, answer: str, cuts: list[int]
) -> None:
    assert read(FORMATS[name], cut(answer, cuts), by_argument=False) == (answer, "", [])


@pytest.mark.parametrize(
    ("body", "shown"),
    [("[1]", "[1]"), ('{"a": 1', '{"a": 1'), ('{"a": 1} or so', '{"a": 1} or so')],
)
def test_a_body_of_harmony_that_is_no_call_is_text(body: str, shown: str) -> None:
    answer = f"<|channel|>commentary to=functions.add<|message|>{body}<|call|>"
    assert read(FORMATS["harmony"], list(answer), by_argument=False) == (shown, "", [])
    undeclared = f"<|channel|>commentary to=functions.rm<|message|>{body}<|end|>"
    assert read(FORMATS["harmony"], list(undeclared)) == (body, "", [])


@pytest.mark.parametrize(
    ("name", "answer", "rest"),
    [
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": {"a": 1, "b": }}</tool_call>Hm.',
            "Hm.",
        ),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "x', ', "b": "x'),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1,}}', None),
        ("pythonic", "[add(a=1, b=c)]", None),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, b}', None),
        ("qwen3_coder", f"{BEGUN}<parameter=b>x</function>Hm.", "Hm."),
        ("glm45", f"{GLM_BEGUN}<arg_key>b</arg_key>x</tool_call>Hm.", "Hm."),
        ("glm45", f"{GLM_BEGUN}<arg_key>b</arg_key><arg_value>x", None),
        ("glm4", 'add\n{"a": 1, b}', None),
        ("qwen3_coder", f"<tool_call>{BEGUN}x</function>\n</tool_call>\nHm.", "Hm."),
        ("qwen3_coder", f"<tool_call>{BEGUN}<parameter=b>x\n</tool_call> Hm.", " Hm."),
        ("harmony", "<|channel|>commentary to=functions.add<|message|>{\"a\": 1, 'b'}<|call|>", ""),
    ],
)
def test_a_streamed_call_that_breaks_off_keeps_its_whole_arguments(
    name: str, answer: str, rest: str | None
) -> None:
    text, _, calls = read(FORMATS[name], list(answer))
    assert calls == [("add", {"a": 1})]
    assert rest is None or text == rest
    parser = FORMATS[name].parser(TOOLS, is_forced=False, by_argument=True, in_reasoning=False)
    parser.push(list(answer))
    parser.finish()
    assert (parser.cut_calls, parser.calls_tools) == ({0}, False)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}, "why": 2}</tool_call>'),
        ("harmony", '<|channel|>commentary to=functions.add<|message|>{"a": 1} so<|call|>'),
    ],
)
def test_a_slip_behind_whole_arguments_cuts_no_streamed_call(name: str, answer: str) -> None:
    parser = FORMATS[name].parser(TOOLS, is_forced=False, by_argument=True, in_reasoning=False)
    text, _, calls = gathered([*parser.push(list(answer)), *parser.finish()])
    assert (text, calls) == ("", [("add", '{"a": 1}')])
    assert (parser.cut_calls, parser.calls_tools) == (set(), True)


@pytest.mark.parametrize("parallel", [False, True])
def test_a_whole_call_before_one_that_breaks_off_is_no_cut_one(parallel: bool) -> None:
    answer = (
        '<tool_call>{"name": "now"}</tool_call>'
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": }}</tool_call>'
    )
    parser = FORMATS["hermes"].parser(
        TOOLS, is_forced=False, by_argument=True, in_reasoning=False, parallel=parallel
    )
    _, _, calls = gathered([*parser.push(list(answer)), *parser.finish()])
    assert [name for name, _ in calls] == (["now", "add"] if parallel else ["now"])
    assert (parser.cut_calls, parser.calls_tools) == ({1} if parallel else set(), not parallel)


@given(
    name=st.sampled_from(sorted(FORMATS)),
    parts=st.lists(
        st.sampled_from(
            sorted(
                {answer[i : i + 7] for _, answer, _, _ in WELL_FORMED for i in range(len(answer))}
            )
        ),
        max_size=40,
    ),
    cuts=CUTS,
)
@settings(max_examples=300, deadline=None)
def test_no_text_makes_a_malformed_call_and_no_cut_another_answer(
    name: str, parts: list[str], cuts: list[int]
) -> None:
    answer = "".join(parts)
    for by_argument in (False, True):
        whole = read(FORMATS[name], [answer], by_argument=by_argument)
        assert read(FORMATS[name], cut(answer, cuts), by_argument=by_argument) == whole
        assert read(FORMATS[name], list(answer), by_argument=by_argument) == whole


def test_a_call_is_found_behind_one_that_breaks_off() -> None:
    broken = '<tool_call>{"name": "add" '
    answer = f'{broken}<tool_call>{{"name": "now"}}</tool_call>'
    assert read(FORMATS["hermes"], list(answer)) == (broken, "", [NOW])
    sent = f'<tool_call>{{"name": "add", "arguments": {{"a": 1, {answer}'
    assert read(FORMATS["hermes"], list(sent))[2] == [("add", {"a": 1}), NOW]


@pytest.mark.parametrize("end", ["", "\n", "</tool", "</tool_call>"])
def test_the_end_of_the_text_closes_a_whole_call(end: str) -> None:
    answer = f'<tool_call>{{"name": "now", "arguments": {{}}}}{end}'
    assert read(FORMATS["hermes"], list(answer)) == ("", "", [NOW])


def test_text_behind_a_broken_list_does_not_wait_for_a_mark_that_ends_other_calls() -> None:
    parser = FORMATS["phi4_mini"].parser(
        TOOLS, is_forced=False, by_argument=True, in_reasoning=False
    )
    pieces = parser.push(list('functools[{"name": "add", "arguments": {"a": 1},,}] and more'))
    assert gathered(pieces) == ("and more", "", [("add", '{"a": 1}')])


def test_a_list_that_breaks_off_keeps_the_calls_before() -> None:
    answer = '[TOOL_CALLS][{"name": "now"}, {"name": "rm"}]'
    assert read(FORMATS["mistral"], list(answer)) == (', {"name": "rm"}]', "", [NOW])


def test_openings_within_openings_are_not_read_for_ever() -> None:
    answer = ('<tool_call>{"arguments":' + "[" * 20) * 3000
    parser = FORMATS["hermes"].parser(TOOLS, is_forced=False, by_argument=True, in_reasoning=False)
    begin_s = time.process_time()
    found = [*parser.push([answer]), *parser.finish()]
    assert gathered(found) == (answer, "", [])
    assert time.process_time() - begin_s < 10  # a hundred times less, against minutes


@pytest.mark.parametrize("name", ["kimi_k2", "deepseek_v31", "solar_open", "hermes", "minimax_m2"])
def test_a_long_call_before_a_malformed_one_is_not_read_in_vain(name: str) -> None:
    long = ("add", {"a": 1, "b": "x" * MOST_MISREAD})
    answer = TOOL_FORMATS[name].written([long, ("rm", {}), NOW])
    answer += TOOL_FORMATS[name].written([("rm", {})]) + TOOL_FORMATS[name].written([NOW])
    for chunks in ([answer], list(answer)):
        assert read(FORMATS[name], chunks)[2] == [long, NOW, NOW]
