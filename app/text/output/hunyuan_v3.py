"""Hunyuan 3 (Hy3): arguments as GLM-4.5 writes them, in marks of their own and of all.

<tool_calls>
<tool_call>add<tool_sep>
<arg_key>a</arg_key>
<arg_value>1</arg_value>
</tool_call>
</tool_calls>

All marks of the published weights end with `:opensource>`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from actors.scheduling.request import HeldCall, HeldCalls
from app.text.output.glm import Glm45
from app.text.output.interface import maybe_end
from app.text.output.json_text import Calls, words
from app.text.output.pieces import AnswerPieces
from app.text.output.source import Reading, Source
from app.text.output.tags import Tags, lines
from app.text.output.thinking import Think

_SUFFIX: Final = ":opensource"
_NAMES: Final = ("tool_calls", "tool_call", "arg_key", "arg_value")


def _marks(suffix: str) -> tuple[str, ...]:
    """Of all calls, one, a key and a value, and their ends; what stands behind a name."""
    begin, end = ([f"{mark}{name}{suffix}>" for name in _NAMES] for mark in ("<", "</"))
    return (*begin, *end, f"<tool_sep{suffix}>")


class HunyuanV3(Glm45):
    """The marks around all calls, and the one behind a name, may be missing."""

    suffix: ClassVar[str] = ""
    special_tokens: ClassVar[tuple[str, ...]] = _marks(suffix)
    openings: ClassVar[tuple[str, ...]] = special_tokens[:2]
    closing: ClassVar[tuple[str, ...]] = (special_tokens[5], special_tokens[4])
    separator = special_tokens[8]
    tags: ClassVar[Tags] = Tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>")

    @classmethod
    def is_of(cls, template: str) -> bool:
        return "<tool_sep" in template and (_SUFFIX in template) == bool(cls.suffix)

    @classmethod
    def written(cls, calls: Calls) -> str:
        ones = [
            f"{cls.openings[1]}{name}{cls.separator}\n{cls.tags.written(given)}{cls.closing[0]}\n"
            for name, given in calls
        ]
        return f"{cls.openings[0]}\n{''.join(ones)}{cls.closing[1]}" if ones else ""

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        bare = tuple(
            HeldCall(name, (*lines(f"{name}{cls.separator}\n"), *given, words(cls.closing[0])))
            for name, given in cls.tags.held(schemas).items()
        )
        whole = tuple(HeldCall(call.name, (words(cls.openings[1]), *call.parts)) for call in bare)
        return (
            HeldCalls(cls.openings[0], "\n", whole, "\n", f"\n{cls.closing[1]}"),
            HeldCalls(cls.openings[1], "", bare, None, ""),
        )

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        if opening == self.openings[0]:
            yield from source.blanks()
            yield from source.expect(self.openings[1])
        following = True
        while following:
            yield from super().read_calls(source, out, opening)
            yield from source.blanks()
            following = bool((yield from source.accept(self.openings[1])))
        yield from maybe_end(source, self.closing[1])


class HunyuanV3Open(HunyuanV3):
    """Of the published weights."""

    suffix = _SUFFIX
    special_tokens = _marks(suffix)
    openings = special_tokens[:2]
    closing = (special_tokens[5], special_tokens[4])
    separator = special_tokens[8]
    tags = Tags(special_tokens[2], f"{special_tokens[6]}\n{special_tokens[3]}", special_tokens[7])


class HunyuanV3Think(Think):
    """Of the published weights; others write as most families do."""

    opening = f"<think{_SUFFIX}>"
    closing = f"</think{_SUFFIX}>"
    special_tokens = (opening, closing)

    @classmethod
    def is_of(cls, template: str) -> bool:
        return "<think" in template and HunyuanV3Open.is_of(template)
