"""gpt-oss: an answer is a sequence of messages in channels.

`<|channel|>analysis<|message|>...<|end|>` is reasoning, the channels `final` and `commentary` are
text, and a message `to=functions.NAME` is a call whose body is the JSON of its arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

from actors.scheduling.request import HeldCall, HeldCalls, HeldPart
from app.text.output.interface import ReasoningFormat, ToolFormat, dropped
from app.text.output.json_text import Calls, json_arguments, maybe, one_of, words
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
_OPENING: Final = "to=functions."
_HEADS: Final = ("<|start|>", "<|channel|>")
_FIRST_HEADS: Final = (*_HEADS, _OPENING)  # as `<|start|>assistant` ends the prompt
_CLOSING: Final = ("<|end|>", "<|call|>", "<|return|>")
# Models leave out closing tokens, but no text has a channel's whole head by chance.
_CHANNELS: Final = tuple(f"<|channel|>{name}" for name in ("analysis", "commentary", "final"))
_ENDS: Final = (*_CLOSING, "<|start|>", *_CHANNELS)
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
# Or the beginning of one.
_HEADER: Final = re.compile(
    r"(<\|start\|>\s*\w*)?\s*(to=[\w.-]*)?\s*(<\|channel\|>\s*\w*)?\s*(to=[\w.-]*)?\s*"
    r"(<\|constrain\|>)?\s*\w*\s*(<[^>]*)?"
)
_BEGIN: Final = one_of(words(f"{_CHANNELS[1]} {_OPENING}"), words(f" {_OPENING}"))  # of a call
_BLANK: Final = maybe(words(" "))
_BEFORE_TYPE: Final = one_of(
    HeldPart("all", parts=(_BLANK, words("<|constrain|>"))),
    words(" "),  # or it is read as the end of the name
)
_REST_OF_HEADER: Final = (  # of a call, behind its name
    maybe(_BLANK, one_of(*map(words, _CHANNELS[:2]))),
    maybe(_BEFORE_TYPE, one_of(words("json"), words("code"))),
    _BLANK,
    words("<|message|>"),
)
_RECIPIENT: Final = re.compile(r"\bto=functions\.([A-Za-z0-9_\-]+)")


class HarmonyChannels(ReasoningFormat):
    """Reads the whole answer including calls, because reasoning may precede each call."""

    recognized_by = ("<|channel|>analysis", "<|channel|>")
    special_tokens = _TOKENS
    heads = (f"{_CHANNELS[2]}<|message|>", f"{_CHANNELS[2]} <|constrain|>json<|message|>")

    @classmethod
    def marks(cls, prompt: str) -> tuple[str, ...]:
        """Around one message, up to the header of the next."""
        return f"{_CHANNELS[0]}<|message|>", "<|end|><|start|>assistant"

    def read(self, source: Source, out: AnswerPieces) -> Reading[None]:
        heads: tuple[str, ...] = _FIRST_HEADS
        while True:
            out.part = AnswerPart.UNDECIDED
            start = source.at
            yield from source.blanks()
            head = yield from source.sees(*heads)
            heads = _HEADS
            if not head:
                source.at = start
                out.part = AnswerPart.ANSWER
                if not (yield from source.shown_until(_HEADS, out.text)):
                    return
            start = source.at
            try:
                header, _ = yield from source.until("<|message|>")
            except Broken:  # cut off within a header, or a text that speaks of one
                rest, source.at = source.text[start:], len(source.text)
                if not _HEADER.fullmatch(rest):
                    out.part = AnswerPart.ANSWER
                    out.text(rest)
                return
            yield from _message(source, out, header)
            yield from source.accept(*_CLOSING)
            source.forget()


class Harmony(ToolFormat):
    """The same reader as a tool format, for answers whose reasoning is not separated."""

    recognized_by = HarmonyChannels.recognized_by
    special_tokens = _TOKENS

    @staticmethod
    def written(calls: Calls) -> str:
        return "<|start|>assistant".join(
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            f"{json.dumps(arguments, ensure_ascii=False)}<|call|>"
            for name, arguments in calls
        )

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        """A call ends the answer where its mark is a stop token."""
        calls = (
            HeldCall(name, (words(name), *_REST_OF_HEADER, HeldPart("json", schema)))
            for name, schema in schemas.items()
        )
        return (
            HeldCalls(
                _OPENING,
                "",
                tuple(calls),
                None,
                "<|call|>",
                may_end=True,
                behind=("<|start|>", "<|channel|>", "<|constrain|>"),
                before="<|message|>",
            ),
        )

    @classmethod
    def forced(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        """One call, behind `<|start|>assistant`."""
        calls = cls.held(schemas)[0].calls
        begun = tuple(HeldCall(call.name, (_BEGIN, *call.parts)) for call in calls)
        return (HeldCalls("", "", begun, None, "<|call|>", may_end=True),)

    def read(self, source: Source, out: AnswerPieces) -> Reading[None]:
        yield from HarmonyChannels().read(source, out)


def _message(source: Source, out: AnswerPieces, header: str) -> Reading[None]:
    """One message's body, up to its end token."""
    out.begin_message()
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
    """Read a call; False if the body is not a call: it is then read again as text."""
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
        yield from source.shown_until(_ENDS, dropped)
    return True
