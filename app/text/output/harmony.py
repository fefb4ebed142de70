"""gpt-oss: an answer is a sequence of messages in channels.

`<|channel|>analysis<|message|>...<|end|>` is reasoning, the channels `final` and `commentary` are
text, and a message `to=functions.NAME` is a call whose body is the JSON of its arguments.
"""

from __future__ import annotations

import re
from typing import Final

from app.text.output.interface import ReasoningFormat, ToolFormat
from app.text.output.json_text import json_arguments
from app.text.output.pieces import AnswerPart, AnswerPieces
from app.text.output.source import Broken, Reading, Source

_TOKENS: Final = (
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|return|>",
    "<|call|>",
)
_HEADS: Final = ("<|start|>", "<|channel|>")
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"\bto=functions\.([A-Za-z0-9_\-]+)")


class HarmonyChannels(ReasoningFormat):
    """Reads the whole answer, its calls too: reasoning may come before each of them."""

    recognised_by = ("<|channel|>analysis", "<|channel|>")
    special_tokens = _TOKENS

    def read(self, source: Source, out: AnswerPieces) -> Reading[None]:
        while True:
            out.part = AnswerPart.UNDECIDED
            head = yield from source.sees(*_HEADS)
            if not head:
                out.part = AnswerPart.ANSWER
                if not (yield from source.shown_until(_HEADS, out.text)):
                    return
            try:
                header, _ = yield from source.until("<|message|>")
            except Broken:  # cut off within a header, which is no text
                return
            yield from _message(source, out, header)
            yield from source.accept(*_ENDS[:-1])
            source.forget()


class Harmony(ToolFormat):
    """The same in the other role, where there are tools and no reasoning to be told apart."""

    recognised_by = HarmonyChannels.recognised_by
    special_tokens = _TOKENS

    def read(self, source: Source, out: AnswerPieces) -> Reading[None]:
        yield from HarmonyChannels().read(source, out)


def _message(source: Source, out: AnswerPieces, header: str) -> Reading[None]:
    """One message's body, up to what ends it."""
    recipient = _RECIPIENT.search(header)
    if recipient is not None:
        out.part = AnswerPart.ANSWER
        if (yield from _call(source, out, recipient[1])):
            return
    channel = _CHANNEL.search(header)
    if recipient is None and channel is not None and channel[1] == "analysis":
        out.part = AnswerPart.REASONING
        yield from source.shown_until(_ENDS, out.reasoning)
        out.end_reasoning()
        return
    out.part = AnswerPart.ANSWER
    yield from source.shown_until(_ENDS, out.text)


def _call(source: Source, out: AnswerPieces, name: str) -> Reading[bool]:
    """A call; False where its body is none, from whose beginning on it is text."""
    start = source.at
    draft = out.draft(source)
    try:
        yield from source.blanks()
        draft.begin(name)
        yield from json_arguments(source, draft)
        yield from source.blanks()
        if not (yield from source.sees(*_ENDS)) and source.at < len(source.text):
            raise Broken
        draft.close()
    except Broken:
        if not draft.abandon():
            source.at = start
            return False
        yield from source.shown_until(_ENDS, _drop)
    return True


def _drop(text: str) -> None:
    """What is left of a call that broke."""
