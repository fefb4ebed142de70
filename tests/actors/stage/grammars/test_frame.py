from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from actors.scheduling.request import Frame, HeldCall, HeldCalls, HeldPart
from actors.stage.grammars.guidance import GuidanceCompiler

END, OPEN, CLOSE, CALL = 256, 257, 258, 259
_TEXTS = [bytes([byte]) for byte in range(256)] + 4 * [b""]
_NAMES = {"<think>": OPEN, "</think>": CLOSE, "<tool_call>": CALL}
_SPECIAL = {"<": OPEN, ">": CLOSE, "!": CALL}  # as the texts below write them
_THINK, _CALLS = ("<think>", "</think>"), ("<tool_call>",)


def takes(
    frame: Frame, text: str, *, special: bool, kind: str = "choice", constraint: str = '["yes"]'
) -> bool:
    """special: whether marks are tokens of their own; else they are spelled."""
    matcher = GuidanceCompiler(_TEXTS, (END,), _NAMES if special else {}).compile(
        kind, constraint, frame
    )()
    tokens: list[int] = []
    for char in text:
        if (mark := _SPECIAL.get(char)) is None:
            tokens += char.encode()
        elif special:
            tokens.append(mark)
        else:
            tokens += {OPEN: b"<think>", CLOSE: b"</think>", CALL: b"<tool_call>"}[mark]
    return all(map(matcher.take, tokens)) and (matcher.is_over or matcher.take(END))


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("frame", "taken", "refused"),
    [
        (Frame(_THINK), ["yes", "<a {b>yes", "<>\n\nyes", "\n<a>yes"],
         ["<a", "<a>", "a>yes", "no", "<a>no", "<a>>yes", "<a>! yes"]),
        (Frame(_THINK, True), ["a>yes", ">yes", "<a>\nyes"], ["yes", "a", "a>no"]),
        (Frame(calls=_CALLS), ["yes", "!{a} é", "!a!b"], ["no", "<a>yes", "yes!a", "a!b"]),
        (Frame(_THINK, calls=_CALLS), ["yes", "<a>yes", "<a>\n!b", "!b"], ["<a>b", "no", "<a"]),
        (Frame(_THINK, True, _CALLS), ["a>yes", "a>!b!"], ["yes", "a>b"]),
        (Frame(), ["yes"], ["<a>yes", "!a"]),
        (Frame(_THINK, heads=("So ", *_CALLS)), ["So yes", "!yes", "<a>\nSo yes"], ["yes"]),
        (Frame(_THINK, True, _CALLS, heads=("So ", "")), ["a>So yes", "a>yes", "a>!b"], ["So yes"]),
        (Frame(heads=("So ", ""), tail="<tool_call>."), ["So yes!.", "So yes", "yes"],
         ["yes!.", "So yes!.!.", "!."]),
    ],
)  # fmt: skip
def test_a_frame_has_reasoning_before_the_answer_or_calls_in_its_place(
    frame: Frame, taken: list[str], refused: list[str], special: bool
) -> None:
    assert [text for text in taken if not takes(frame, text, special=special)] == []
    assert [text for text in refused if takes(frame, text, special=special)] == []


@pytest.mark.parametrize("special", [True, False])
def test_special_tokens_of_calls_may_be_in_them(special: bool) -> None:
    frame = Frame(calls=_CALLS, marks=("</think>",))
    assert takes(frame, "!a>b", special=special)
    assert takes(Frame(calls=_CALLS), "!a>b", special=special) != special


_OBJECT = '{"type": "object"}'


def _call(name: str, before: str, schema: str, after: str = ")") -> HeldCall:
    parts = (("text", before), ("json", schema), ("text", after))
    return HeldCall(name, tuple(HeldPart(kind, text) for kind, text in parts))


# `!f(1)` and `!g({...})`, and lists of them between brackets
_INTEGERS = _call("f", "f(", '{"type": "integer"}')
_SINGLE = HeldCalls("<tool_call>", "", (_INTEGERS, _call("g", "g(", _OBJECT)), None, "")
# `{f:1}` as the answer begins, and behind a mark
_DOUBTFUL = [
    HeldCalls(
        opening, "", (_call("f", "{ f :", '{"type": "integer"}', "}"),), "; ", "", may_be_text=True
    )
    for opening in ("", "<tool_call>")
]
_LISTED = HeldCalls("<tool_call>", "[", (_INTEGERS,), ", ", "]")


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("frame", "taken", "refused"),
    [
        (Frame(calls=_CALLS, held=(_SINGLE,)),
         ["", "a é", "!f(1)", 'a !f(1) b!g({"x": [1]})', "a>b", "!f(1)!f(2)"],
         ["!", "!f", "!f(x)", "a!f(x)", "!f(1)!f(x)", "!h(1)", "!g(1)", "a !b"]),
        (Frame(calls=_CALLS, held=(_SINGLE, _LISTED)),
         ["!f(1)", "!f(1)\n!f(2)", "a![f(1), f(2)] b", "![f(1)]!g({})"],
         ["![f(1)", "![]", "![f(1),f(2)]", "![g({})]"]),
        (Frame(calls=_CALLS, held=tuple(_DOUBTFUL)),
         ["{f:1}", "\n{ f :1}", "{f", "{", "a {f:x}", "{f:1} ;{f:2} b", "{f:1}{f:2}", "!b", "!",
          "a!{f:1}; {f:2}b{f:x}", "{f:1}a!{f:1}"],
         ["{f:x}", "{f:1", "{f:1}; {f:x}", "{f:1}{f:x}", "!{f:x}", "a!\n{f:1}\n{f:x}"]),
        (Frame(_THINK, calls=_CALLS, held=tuple(_DOUBTFUL[:1])),
         ["<a>{f:1}", "{f:1}", "<{f:x}>a"], ["<a>{f:x}", "{f:x}"]),
        (Frame(_THINK, calls=_CALLS, held=(_SINGLE,)), ["<a!b>c!f(1)", "a !f(1)"], ["<a!b>c!f(x)"]),
    ],
)  # fmt: skip
def test_calls_within_text_keep_to_their_schemas(
    frame: Frame, taken: list[str], refused: list[str], special: bool
) -> None:
    if special and frame.reasoning:
        taken = [text.replace("!b", "b") for text in taken]
    options: dict[str, Any] = {"special": special, "kind": "text", "constraint": ""}
    assert [text for text in taken if not takes(frame, text, **options)] == []
    assert [text for text in refused if takes(frame, text, **options)] == []


def test_a_call_may_be_spelled_where_its_mark_is_a_token() -> None:
    frame = Frame(calls=_CALLS, held=(_SINGLE,))
    compile = GuidanceCompiler(_TEXTS, (END,), _NAMES).compile
    for text, is_taken in (("a <tool_call>f(1) b", True), ("a <tool_call>f(x)", False)):
        matcher = compile("text", "", frame)()
        assert all(map(matcher.take, text.encode())) == is_taken


@pytest.mark.parametrize("special", [True, False])
def test_calls_in_an_answers_place_keep_to_their_schemas(special: bool) -> None:
    frame = Frame(_THINK, calls=_CALLS, held=(_SINGLE,))
    for text in ("yes", "!f(1)", "!f(1)\n!f(2)", "<a>!f(1)", "!g({})"):
        assert takes(frame, text, special=special), text
    for text in ("!f(x)", "!f(1) b", "!", "yes!f(1)", "!f(1)yes"):
        assert not takes(frame, text, special=special), text


@pytest.mark.parametrize("special", [True, False])
def test_in_an_answers_place_calls_follow_a_mark(special: bool) -> None:
    frame = Frame(calls=_CALLS, held=tuple(_DOUBTFUL))
    for text in ("yes", "!{f:1}", "!{f:1}; {f:2}", "!{f:1}!{f:2}"):
        assert takes(frame, text, special=special), text
    for text in ("", "{f:1}", "!b", "!{f:x}", "!", "!{f:1}b"):
        assert not takes(frame, text, special=special), text
    frame = Frame(held=tuple(_DOUBTFUL[:1]))
    assert takes(frame, "yes", special=special)
    for text in ("", "{f:1}"):
        assert not takes(frame, text, special=special), text


def test_the_tool_is_named_whose_schema_cannot_be_kept() -> None:
    calls = (_call("f", "f(", _OBJECT), _call("odd", "o(", '{"not": {}}'))
    held = HeldCalls("<tool_call>", "", calls, None, "")
    with pytest.raises(ValueError, match=r"not.*in the parameters of 'odd'"):
        GuidanceCompiler(_TEXTS, (END,)).compile("text", "", Frame(calls=_CALLS, held=(held,)))


def test_a_way_may_lack_a_tool_that_another_has() -> None:
    bare = _call("f", "f(", _OBJECT)
    lacking = HeldCall(
        "odd", (HeldPart("text", "odd("), HeldPart("python", '{"minProperties": 1}'))
    )
    odd = _call("odd", "o(", '{"type": "object", "minProperties": 1}')
    first = HeldCalls("<tool_call>", "", (bare, lacking), None, "", may_lack=True)
    other = HeldCalls("<tool_call>", "", (odd,), None, "")
    frame = Frame(calls=_CALLS, held=(first, other))
    assert takes(frame, '!f({"a": 1})', special=False)
    assert takes(frame, '!o({"a": 1})', special=False)
    for text in ("!odd(a=1)", "!o({})"):
        assert not takes(frame, text, special=False)
    with pytest.raises(ValueError, match="'minProperties'"):
        GuidanceCompiler(_TEXTS, (END,)).compile(
            "text", "", Frame(held=(replace(first, may_lack=False), other))
        )
