from __future__ import annotations

import pytest

from actors.scheduling.request import Frame
from actors.stage.grammars.guidance import GuidanceCompiler

END, OPEN, CLOSE, CALL = 256, 257, 258, 259
_TEXTS = [bytes([byte]) for byte in range(256)] + 4 * [b""]
_NAMES = {"<think>": OPEN, "</think>": CLOSE, "<tool_call>": CALL}
_SPECIAL = {"<": OPEN, ">": CLOSE, "!": CALL}  # as the texts below write them
_THINK, _CALLS = ("<think>", "</think>"), ("<tool_call>",)


def takes(frame: Frame, text: str, *, special: bool) -> bool:
    """special: whether marks are tokens of their own; else they are spelled."""
    matcher = GuidanceCompiler(_TEXTS, (END,), _NAMES if special else {}).compile(
        "choice", '["yes"]', frame
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
