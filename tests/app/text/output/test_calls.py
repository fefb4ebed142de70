"""Every format of tool calls: what is one, what is none, and that the text's cut is nothing."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.text.output.pieces import CallDelta, gathered
from app.text.output.registry import TOOL_FORMATS, OutputFormats
from tests.app.text.output.reading import CUTS, TOOLS, cut, pieces_of, read

FORMATS = {name: OutputFormats(one, None) for name, one in TOOL_FORMATS.items()}
ADD = ("add", {"a": 1, "b": 'x}\\"{ é'})
NOW = ("now", {})
PLOT = ("plot", {"points": [[1, 2], {"x": [3.5]}], "scale": 0.5, "grid": True, "title": None})
WRITTEN = json.dumps(ADD[1], ensure_ascii=False)
PLOTTED = json.dumps(PLOT[1])
BEGUN = "<function=add><parameter=a>1</parameter>"
END = "<|end|><|start|>assistant"

# Format -> (an answer, the text it holds, the calls).
WELL_FORMED: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    (
        "hermes",
        f'Let me see.<tool_call>\n{{"name": "add", "arguments": {WRITTEN}}}\n</tool_call>\n'
        f'<tool_call>{{"arguments": {PLOTTED}, "name": "plot"}}</tool_call>Done.',
        "Let me see.Done.",
        [ADD, PLOT],
    ),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [NOW]),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("add", {"a": 1})],
    ),
    (
        "llama3_json",
        f'\n{{"type": "function", "name": "add", "parameters": {WRITTEN}}}',
        "",
        [ADD],
    ),
    (
        "llama3_json",
        f'Well: <|python_tag|>{{"name": "add", "parameters": {WRITTEN}}}; '
        f'{{"name": "plot", "parameters": {PLOTTED}}}',
        "Well: ",
        [ADD, PLOT],
    ),
    ("llama3_json", '{"name": "now", "parameters": {}} is the call.', "is the call.", [NOW]),
    (
        "pythonic",
        "[add(a=1, b='x}\\\\\"{ é'), now(), plot(points=[[1, 2], {'x': [3.5]}], scale=.5,"
        " grid=true, title=None)]",
        "",
        [ADD, NOW, PLOT],
    ),
    ("pythonic", "Sure: <|python_start|>[now()]<|python_end|>", "Sure: ", [NOW]),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "add", "arguments": {WRITTEN}, "id": "abcdefghi"}}, '
        f'{{"name": "plot", "arguments": {PLOTTED}}}]',
        "",
        [ADD, PLOT],
    ),
    (
        "mistral",
        f"Yes.[TOOL_CALLS]add[ARGS]{WRITTEN}[TOOL_CALLS]plot[CALL_ID]a1b2[ARGS]{PLOTTED}",
        "Yes.",
        [ADD, PLOT],
    ),
    ("mistral", "[TOOL_CALLS]now{}", "", [NOW]),
    (
        "granite",
        f'Yes.<|tool_call|> [{{"name": "add", "arguments": {WRITTEN}}}, '
        f'{{"name": "plot", "arguments": {PLOTTED}}}]',
        "Yes.",
        [ADD, PLOT],
    ),
    ("tool_code", "[add(a=1, b='x}\\\\\"{ é'), now()]", "", [ADD, NOW]),
    (
        "tool_code",
        "I look.\n```tool_code\nnow()\nplot(points=[[1, 2], {'x': [3.5]}], scale=0.5, grid=True,"
        " title=None)\n```\n",
        "I look.\n",
        [NOW, PLOT],
    ),
    ("tool_code", "```tool_code\n[now(), now()]\n```", "", [NOW, NOW]),
    (
        "qwen3_coder",
        "I look.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n"
        f"{ADD[1]['b']}\n</parameter>\n</function>\n</tool_call>\n<tool_call><function=now>"
        "</function></tool_call>",
        "I look.\n",
        [ADD, NOW],
    ),
    (
        "qwen3_coder",
        "<function=plot>\n<parameter=points>\n"
        '[[1, 2], {"x": [3.5]}]\n</parameter>\n<parameter=scale>0.5</parameter>\n'
        "<parameter=grid>True</parameter><parameter=title>null</parameter></function></tool_call>",
        "",
        [PLOT],
    ),
    ("qwen3_coder", "<tool_call><function=now></function> and more", "and more", [NOW]),
    (
        "harmony",
        f"<|channel|>commentary<|message|>I look.{END} to=functions.add<|channel|>commentary "
        f"<|constrain|>json<|message|>{WRITTEN}<|call|>",
        "I look.",
        [ADD],
    ),
    (
        "harmony",
        f"<|channel|>commentary to=functions.plot json<|message|>{PLOTTED}<|call|><|start|>"
        "assistant<|channel|>commentary to=functions.now<|message|>{}",
        "",
        [PLOT, NOW],
    ),
]


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


MALFORMED = [
    ("hermes", "no call"),
    ("hermes", "a < b <tool"),
    ("hermes", "<tool_call>not json</tool_call>"),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 3}</tool_call>'),
    ("hermes", '<tool_call>{"nam'),
    ("hermes", '<tool_call>{"name": "rm", "arguments": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "a": 2}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": one}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": "a, b"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}} and so on'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}'),
    ("hermes", '<tool_call>{"name": "ad<tool'),
    ("llama3_json", '{"city": "Paris", "name": "add"}'),
    ("llama3_json", '{"name": "Ann", "parameters": {}}'),
    ("llama3_json", '{"name": "add", "parameters": 3}'),
    ("llama3_json", 'The call is {"name": "now", "parameters": {}}'),
    ("llama3_json", '<|python_tag|>brave.call(query="x")'),
    ("pythonic", "[add](http://example.org)"),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "[rm(a=1)]"),
    ("pythonic", "[add(1)]"),
    ("pythonic", "[add(a=b)]"),
    ("pythonic", "[add(a={1})]"),
    ("pythonic", "[add(a=1e999)]"),
    ("pythonic", "[add(a=[1)]"),
    ("pythonic", "[add(a='x"),
    ("pythonic", "Use [now()]"),
    ("mistral", "[TOOL_CALLS]rm[ARGS]{}"),
    ("mistral", '[TOOL_CALLS][{"name": "rm"}]'),
    ("mistral", "[TOOL_CALLS]add[ARGS][1]"),
    ("mistral", "[TOOL_CALLS]add and multiply"),
    ("mistral", "[TOOL_CAL"),
    ("granite", '<|tool_call|>[{"name": "rm"}]'),
    ("granite", "<|tool_call|>none"),
    ("tool_code", "```tool_code\nprint(1)\n```"),
    ("tool_code", "now()"),
    ("qwen3_coder", "<tool_call>\n<function=rm>\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>{}</tool_call>"),
    ("qwen3_coder", "<function=add><parameter=a>one</parameter></function>"),
    ("qwen3_coder", "<function=add>1</function>"),
    ("qwen3_coder", "<function=plot><parameter=grid>1</parameter></function>"),
]


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
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}}</tool_call>', ""),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1,}}', None),
        ("pythonic", "[add(a=1, b=c)]", None),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, b}', None),
        ("qwen3_coder", f"{BEGUN}<parameter=b>x</function>Hm.", "Hm."),
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


@pytest.mark.parametrize("end", ["", "\n", "</tool", "</tool_call>"])
def test_the_end_of_the_text_closes_a_whole_call(end: str) -> None:
    answer = f'<tool_call>{{"name": "now", "arguments": {{}}}}{end}'
    assert read(FORMATS["hermes"], list(answer)) == ("", "", [NOW])


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
