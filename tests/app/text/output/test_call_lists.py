"""A malformed call among several: it is text, and those before and behind it are calls."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.text.output.pieces import MOST_MISREAD, gathered
from app.text.output.registry import TOOL_FORMATS, OutputFormats
from tests.app.text.output.answers import ADD, NOW, WRITTEN
from tests.app.text.output.answers_between_marks import LFM, LFM_END
from tests.app.text.output.answers_by_name import DSML, DSML_END, INVOKE, INVOKE_END
from tests.app.text.output.reading import CUTS, TOOLS, cut, read

FORMATS = {name: OutputFormats(one, None) for name, one in TOOL_FORMATS.items()}
A, N = '{"name": "add", "arguments": {"a": 1}}', '{"name": "now", "arguments": {}}'
ONE = ("add", {"a": 1})
NO_CALLS = [  # members of a list
    '{"name": "rm", "arguments": {}}',
    '{"name": "rm", "arguments": {"all": [{"name": "now", "arguments": {}}, "}]"]}}',
    '{"name": "rm", "arguments": ["a, \\"]", {"b": [}}',
    '{"name": 3}',
    '{"name": "now", "arguments": [1]}',
    '{"arguments": {}, "why": now}',
    "now",
    "",
    "{]}",
]
LISTS = {
    "hermes": ("<tool_call>[", "]</tool_call>"),
    "mistral": ("[TOOL_CALLS][", "]"),
    "granite": ("<|tool_call|>[", "]"),
    "phi4_mini": ("<|tool_call|>[", "]<|/tool_call|>"),
    "cohere": ("<|START_ACTION|>[", "]<|END_ACTION|>"),
    "hunyuan": ("<tool_calls>[", "]</tool_calls>"),
    "lfm2": ("<|tool_call_start|>[", "]<|tool_call_end|>"),
    "nemotron": ("<TOOLCALL>[", "]</TOOLCALL>"),
    "xlam": ("[", "]"),
}


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("bad", NO_CALLS)
@given(cuts=CUTS)
@settings(max_examples=3, deadline=None, derandomize=True)
def test_a_malformed_member_of_a_list_takes_no_other_along(
    name: str, bad: str, cuts: list[int]
) -> None:
    begin, end = LISTS[name]

    def found(members: list[str]) -> Any:
        answer = f"{begin}{', '.join(members)}{end}"
        whole = read(FORMATS[name], [answer], by_argument=False)
        assert whole == read(FORMATS[name], cut(answer, cuts), by_argument=True)
        assert whole == read(FORMATS[name], list(answer), by_argument=True)
        return whole

    if bad == "{]}":  # the list ends here
        assert found([A, bad, N]) == (f", {bad}, {N}{end}", "", [ONE])
        return
    assert found([A, bad, N]) == (f", {bad}", "", [ONE, NOW])
    assert found([A, bad, bad, N, A]) == (f", {bad}, {bad}", "", [ONE, NOW, ONE])
    assert found([A, bad]) == (f", {bad}{end}", "", [ONE])
    if name == "lfm2" and not bad.startswith("{"):
        return  # which is a list in Python's syntax
    first = found([bad, A])
    if name == "xlam":  # lists that begin otherwise are answers
        assert first == (f"[{bad}, {A}]", "", [])
    else:
        assert first == (f"{begin}{bad}", "", [ONE])


M2, M2_END = "<minimax:tool_call>", "</minimax:tool_call>"
M2_A = '<parameter name="a">1</parameter>'
CODE = "if rm():\n    now()\n```"
INVOKES = (
    f'{INVOKE}rm"></invoke>{INVOKE_END}',
    f'{DSML}{INVOKE}now">{INVOKE_END}\n{INVOKE}rm"></invoke>{INVOKE_END}\n{INVOKE}now">{INVOKE_END}',
)


@pytest.mark.parametrize(
    ("name", "answer", "text", "calls"),
    [
        ("hermes", f"<tool_call>[{A} so, {N}]</tool_call>", " so", [ONE, NOW]),
        (
            "apertus",
            f'<|tools_prefix|>[{{"rm": {{}}}}, {{"add": {WRITTEN}}}]<|tools_suffix|>.',
            '<|tools_prefix|>[{"rm": {}}.',
            [ADD],
        ),
        ("pythonic", "[now(), rm('(', a=[1, 2]), add(a=1)]", ", rm('(', a=[1, 2])", [NOW, ONE]),
        ("pythonic", "[rm(), now()]", "[rm(), now()]", []),
        ("lfm2", f"{LFM}[rm(), now()]{LFM_END}", f"{LFM}[rm()", [NOW]),
        (
            "minimax_m1",
            f'<tool_calls>\n{N}\n{{"name": "rm"}}\n{A}\n</tool_calls>.',
            '{"name": "rm"}.',
            [NOW, ONE],
        ),
        (
            "minimax_m2",
            f'{M2}\n<invoke name="rm">\n{M2_A}\n</invoke>\n<invoke name="now"></invoke>\n{M2_END}.',
            f'{M2}\n<invoke name="rm">\n{M2_A}\n</invoke>.',
            [NOW],
        ),
        ("deepseek_v32", f"{INVOKES[1]}{DSML_END}.", f"{INVOKES[0]}.", [NOW, NOW]),
        ("tool_code", f"```tool_code\nnow()\n{CODE}", CODE, [NOW]),
    ],
)
@given(cuts=CUTS)
@settings(max_examples=5, deadline=None, derandomize=True)
def test_a_malformed_call_among_others_is_text(
    name: str, answer: str, text: str, calls: list[tuple[str, Any]], cuts: list[int]
) -> None:
    for texts in ([answer], list(answer), cut(answer, cuts)):
        for by_argument in (False, True):
            assert read(FORMATS[name], texts, by_argument=by_argument) == (text, "", calls)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        (name, f'{begin}{N}, {{"name": "add", "arguments": {{"a": 1, "b": x{more}, {A}{end}Hm.')
        for name, (begin, end) in LISTS.items()
        for more in ("}}", ', "]"}, "so": [1, "}"]}')
    ]
    + [
        ("pythonic", "[now(), add(a=1, b=c(')')), add(a=1)]Hm."),
        (
            "minimax_m2",
            f'{M2}<invoke name="now"></invoke><invoke name="add">{M2_A}x</invoke>\n'
            f'<invoke name="add">{M2_A}</invoke>{M2_END}Hm.',
        ),
        (
            "minimax_m1",
            f"<tool_calls>{N}\n{A[:-2]}, b}}}}\n{A}\n</tool_calls>Hm.",
        ),
    ],
)
def test_a_call_sent_in_part_takes_no_other_along(name: str, answer: str) -> None:
    assert read(FORMATS[name], list(answer)) == ("Hm.", "", [NOW, ONE, ONE])
    parser = FORMATS[name].parser(TOOLS, is_forced=False, by_argument=True, in_reasoning=False)
    parser.push([answer])
    assert parser.cut_calls == {1}


@pytest.mark.parametrize("name", LISTS)
def test_nothing_of_a_list_that_breaks_off_is_lost(name: str) -> None:
    begin, _ = LISTS[name]
    answer = f'{begin}{N}, {{"name": "rm", "arguments": {{"a": "x'
    whole = (answer.removeprefix(f"{begin}{N}"), "", [NOW])
    assert read(FORMATS[name], [answer], by_argument=False) == whole
    assert read(FORMATS[name], list(answer)) == whole
    sent = f'{begin}{N}, {{"name": "add", "arguments": {{"a": 1, "b": "x'
    assert read(FORMATS[name], list(sent)) == (', "b": "x', "", [NOW, ONE])


@pytest.mark.parametrize(
    "bad",
    ['{"arguments":{"x":[[[}},' * 4000, '{"arguments":"",,' * 4000, "[" * 40_000 + "}" * 40_000],
)
def test_malformed_members_are_read_in_linear_time(bad: str) -> None:
    """The first kind has no end for one who counts brackets."""
    answer = f"[TOOL_CALLS][{bad}"
    begin_s = time.process_time()
    assert read(FORMATS["mistral"], [answer]) == (answer, "", [])
    assert time.process_time() - begin_s < 10  # a hundred times less


def test_the_text_of_a_malformed_call_does_not_wait_for_its_end() -> None:
    parser = FORMATS["mistral"].parser(TOOLS, is_forced=False, by_argument=True, in_reasoning=False)
    begun = '[TOOL_CALLS][{"name": "rm", "arguments": {"a": "so and so'
    assert gathered(parser.push(list(begun))) == (begun, "", [])


WITHOUT_END = {
    "minimax_m2": "</invoke>",
    "dots": "</invoke>",
    "step3": "</steptml:invoke>",
    "deepseek_v32": INVOKE_END,
    "deepseek_v4": INVOKE_END,
    "minicpm5": "</function>",
    "kimi_k2": "<|tool_call_end|>",
    "deepseek_v31": "<｜tool▁call▁end｜>",
    "glm45": "</tool_call>",
    "longcat": "</longcat_tool_call>",
    "hunyuan_v3": "</tool_call>",
    "kimi_k3": "<|close|>call<|sep|>",
    "plamo3": "<|plamo:end_tool_request:plamo|>",
}


@pytest.mark.parametrize("name", WITHOUT_END)
@pytest.mark.parametrize("number", range(3))
@given(cuts=CUTS)
@settings(max_examples=3, deadline=None, derandomize=True)
def test_a_call_without_its_end_takes_no_other_along(
    name: str, number: int, cuts: list[int]
) -> None:
    given_calls = [("add", {"a": n}) for n in range(4)]
    parts = TOOL_FORMATS[name].written(given_calls).split(WITHOUT_END[name])
    parts[number : number + 2] = ["".join(parts[number : number + 2])]
    answer = WITHOUT_END[name].join(parts)
    for by_argument in (False, True):
        found = read(FORMATS[name], [answer], by_argument=by_argument)
        assert found == read(FORMATS[name], cut(answer, cuts), by_argument=by_argument)
        assert found == read(FORMATS[name], list(answer), by_argument=by_argument)
        is_kept = by_argument or len(found[2]) == 4  # it has its arguments, or is text
        assert found[2] == [one for n, one in enumerate(given_calls) if is_kept or n != number]


def test_a_text_of_python_in_three_quotation_marks_holds_no_call() -> None:
    broken = "rm(a='''don't), now(), x''')"
    answer = f"{LFM}[now(), {broken}, add(a=1)]{LFM_END}"
    for chunks in ([answer], list(answer)):
        assert read(FORMATS["lfm2"], chunks)[2] == [NOW, ONE]


PYTHON_LISTS = {
    "lfm2": (f"{LFM}[", f"]{LFM_END}"),
    "pythonic": ("[", "]"),
    "tool_code": ("```tool_code\n[", "]\n```"),
}


@pytest.mark.parametrize("name", PYTHON_LISTS)
@pytest.mark.parametrize(
    "text",
    [
        *("'don't'", '"say "hi" to (me), now"', "'the dogs' bones :)'", "'don't, (won't)'"),
        *("'''it's''' so", "['it's', {'a': 'b'}]", '"it\'s" so', "'its' + 'a, ('", "r'[' x"),
        *("don't", "'x', so it's", "'' she's", "'they've [], 'we've'", "'\\'', 's'"),
    ],
)
@given(cuts=CUTS)
@settings(max_examples=3, deadline=None, derandomize=True)
def test_an_apostrophe_in_a_text_of_python_takes_no_other_call_along(
    name: str, text: str, cuts: list[int]
) -> None:
    begin, end = PYTHON_LISTS[name]
    answer = f"{begin}now(), add(b={text}), add(a=1), rm(a={text}), now(){end}"
    for chunks in ([answer], list(answer), cut(answer, cuts)):
        found = read(FORMATS[name], chunks, by_argument=False)
        assert found == (f", add(b={text}), rm(a={text})", "", [NOW, ONE, NOW])


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize(
    "text",
    [
        *('"say "hi" now"', '"5" wide, 3""', '"he said "hi""', '["a "b" c", "d"]', '{"k": "a"b"}'),
        *('""hi" he said"', '"tab "" end"', '"so "a", "b" ok"', 'so"', '"\\"" [x"y", "z"]'),
    ],
)
@given(cuts=CUTS)
@settings(max_examples=3, deadline=None, derandomize=True)
def test_a_quotation_mark_in_a_text_of_json_takes_no_other_call_along(
    name: str, text: str, cuts: list[int]
) -> None:
    begin, end = LISTS[name]
    members = [f'{{"name": "{tool}", "arguments": {{"b": {text}}}}}' for tool in ("add", "rm")]
    answer = f"{begin}{', '.join([N, members[0], A, members[1], N])}{end}"
    for chunks in ([answer], list(answer), cut(answer, cuts)):
        found = read(FORMATS[name], chunks, by_argument=False)
        assert found == (f", {members[0]}, {members[1]}", "", [NOW, ONE, NOW])


@pytest.mark.parametrize(
    ("name", "begin", "good", "bad"),
    [
        ("lfm2", f"{LFM}[", "add(a=1)", "add(b=['don't'])"),
        (
            *("mistral", "[TOOL_CALLS][", A),
            '{"name": "add", "arguments": {"b": ["say "hi"]}}',
        ),
    ],
)
def test_a_text_that_ends_too_early_is_not_read_to_the_end_in_vain(
    name: str, begin: str, good: str, bad: str
) -> None:
    members = [good, bad, *[good] * (MOST_MISREAD // len(good) + 1)]
    found = read(FORMATS[name], [f"{begin}{', '.join(members)}]"], by_argument=False)
    assert len(found[2]) == len(members) - 1


TEXTS = st.text("ab '\"\\()[]{},:=\n", max_size=8)
NESTED = st.recursive(
    TEXTS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=2)
)


@given(value=NESTED)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_malformed_member_whose_texts_are_well_formed_ends_where_it_ends(value: Any) -> None:
    member = json.dumps({"name": "rm", "arguments": {"x": value}}, ensure_ascii=False)
    for name, answer, bad in (
        ("mistral", f"[TOOL_CALLS][{N}, {member}, {N}]", member),
        ("lfm2", f"{LFM}[now(), rm(x={value!r}), now()]{LFM_END}", f"rm(x={value!r})"),
    ):
        for chunks in ([answer], list(answer)):
            assert read(FORMATS[name], chunks) == (f", {bad}", "", [NOW, NOW])
