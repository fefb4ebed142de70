"""MiniMax-M2, dots and DeepSeek-V3.2: tags with names as attributes, and marks around all calls.

<minimax:tool_call>
<invoke name="add">
<parameter name="a">1</parameter>
</invoke>
</minimax:tool_call>

DeepSeek-V3.2's tags also tell texts from other values; V4's are the same between other marks:

<｜DSML｜function_calls>
<｜DSML｜invoke name="add">
<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar, Final

from actors.scheduling.request import HeldCall, HeldCalls, HeldPart
from app.text.output.call_lists import one_of_several
from app.text.output.interface import ToolFormat, maybe_end
from app.text.output.json_text import Calls, json_arguments, words
from app.text.output.pieces import MOST_MISREAD, AnswerPieces, Draft
from app.text.output.source import Broken, Reading, Source
from app.text.output.tags import Tags, lines

_ALL, _ALL_END = "<minimax:tool_call>", "</minimax:tool_call>"
_DSML: Final = "｜DSML｜"
_NAME: Final = re.compile(r"[^<>\r\n]+")  # a parameter's may have blanks


class MiniMaxM2(ToolFormat):
    """The tool's schema gives the type of each value."""

    recognized_by: ClassVar[tuple[str, ...]] = (_ALL,)
    special_tokens: ClassVar[tuple[str, ...]] = (_ALL, _ALL_END)
    openings: ClassVar[tuple[str, ...]] = (_ALL,)
    closing: ClassVar[tuple[str, ...]] = ("</invoke>", _ALL_END)
    call: ClassVar[str] = '<invoke name="'
    tags: ClassVar[Tags] = Tags('<parameter name="', '">', "</parameter>")
    argument: ClassVar[str] = tags.begin
    end: ClassVar[str] = ""  # behind a call's closing tag

    @classmethod
    def written(cls, calls: Calls) -> str:
        ones = [
            f'{cls.call}{name}">\n{cls.tags.written(arguments)}{cls.closing[0]}{cls.end}\n'
            for name, arguments in calls
        ]
        return f"{cls.openings[0]}\n{''.join(ones)}{cls.closing[1]}" if ones else ""

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        end = words(f"{cls.closing[0]}{cls.end}")
        calls = tuple(
            HeldCall(name, (*lines(f'{cls.call}{name}">\n'), *arguments, end))
            for name, arguments in cls.tags.held(schemas).items()
        )
        return (HeldCalls(cls.openings[0], "\n", calls, "\n", f"\n{cls.closing[-1]}"),)

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        yield from source.blanks()
        yield from source.expect(self.call)
        ends = (self.call, *self.marks(source, opening))

        def skip(start: int) -> Reading[bool]:
            """A value that ends is passed over whole, as it may speak of calls."""
            source.at = start
            while (yield from source.go_to(self.argument, *ends)) == self.argument:
                try:
                    yield from source.until(self.tags.end)
                except Broken:
                    source.at += len(self.argument)
            if (yield from source.sees(self.call)):
                return True
            if not (yield from source.accept(self.closing[0])):
                return False
            yield from self._end(source)
            return True

        following = True
        while following:
            is_call = yield from one_of_several(source, out, self._call, source.blanks, skip)
            yield from source.blanks()
            following = bool((yield from source.accept(self.call)))
        if not is_call:
            raise Broken
        yield from maybe_end(source, self.closing[1])

    def _call(self, source: Source, draft: Draft) -> Reading[None]:
        draft.begin(_unquoted((yield from _attributes(source))))
        yield from self._arguments(source, draft)
        yield from self._end(source)

    def _end(self, source: Source) -> Reading[None]:
        """Read what stands behind a call's closing tag; it may be missing."""
        if self.end:
            yield from source.blanks()
            yield from source.accept(self.end)

    def _arguments(self, source: Source, draft: Draft) -> Reading[None]:
        while True:
            yield from source.blanks()
            if (yield from source.expect(self.argument, self.closing[0])) != self.argument:
                return
            yield from self._argument(source, draft)

    def _argument(self, source: Source, draft: Draft) -> Reading[None]:
        key = _unquoted((yield from _attributes(source)))
        yield from self.tags.read(source, draft, key)


class Dots(MiniMaxM2):
    """Other marks around all calls."""

    recognized_by = ("<dots_function_call>",)
    special_tokens = ("<dots_function_call>", "</dots_function_call>")
    openings = special_tokens[:1]
    closing = ("</invoke>", *special_tokens[1:])


class CDataTags(Tags):
    """A value may stand as in XML where all is text, and then ends with this, too, maybe with
    blanks behind. What looks so within it is between two such sections.
    """

    __slots__ = ()
    wrap: ClassVar[tuple[str, str]] = ("<![CDATA[", "]]>")

    def written_text(self, text: str) -> str:
        begin, end = self.wrap
        if self.end not in text and not text.startswith(begin):
            return text
        return f"{begin}{text.replace(end, f'{end[:2]}{end}{begin}{end[2:]}')}{end}"

    def can_hold(self, text: str) -> bool:
        return True

    def read_to_end(self, source: Source, draft: Draft) -> Reading[None]:
        if draft.num_overread < MOST_MISREAD and (yield from source.sees(self.wrap[0])):
            start = source.at
            try:
                while True:
                    yield from source.until(self.wrap[1])
                    behind = source.at
                    yield from source.blanks()
                    if (yield from source.accept(self.end)):
                        return
                    source.at = behind
            except Broken:
                draft.overread(len(source.text) - start)
                source.at = start
        yield from source.until(self.end)

    def unwrapped(self, value: str) -> str:
        begin, end = self.wrap
        wrapped = value.rstrip(" \t\r\n")
        if not (wrapped.startswith(begin) and wrapped.endswith(end)):
            return value
        return wrapped[len(begin) : -len(end)].replace(f"{end}{begin}", "")

    def until_end(self, tests: tuple[HeldPart, ...]) -> list[HeldPart]:
        begin, end = map(re.escape, self.wrap)
        wrapped = [HeldPart(test.kind, f"{begin}(?:{test.text})") for test in tests]
        wrapped.append(HeldPart("match", rf"{begin}[\s\S]*"))
        ends = rf"{end}[ \t\r\n]+{re.escape(self.end)}"
        if tests:  # which are of the text without the marks of sections within it
            ends = f"{ends}|{end}{begin}"
        wrapped.append(HeldPart("no_match", rf"[\s\S]*(?:{ends})[\s\S]*"))
        plain = HeldPart("no_match", rf"{begin}[\s\S]*")
        return [
            HeldPart("until", self.end, (*tests, plain)),
            HeldPart("until", f"{self.wrap[1]}{self.end}", tuple(wrapped)),
        ]


class MiniCPM5(MiniMaxM2):
    """`<function name="add"><param name="a">1</param></function>`, without marks around all. Read
    with single quotation marks, too.
    """

    recognized_by = ('<function name="',)
    special_tokens = ("<function", "</function>", "<param", "</param>")
    openings = ("<function name=",)
    closing = ("</function>",)
    call = f'{openings[0]}"'
    tags = CDataTags('<param name="', '">', "</param>")
    argument = "<param name="

    @classmethod
    def written(cls, calls: Calls) -> str:
        return "\n".join(
            f'{cls.call}{name}">\n{cls.tags.written(arguments)}{cls.closing[0]}'
            for name, arguments in calls
        )

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        (whole,) = super().held(schemas)
        (opening,) = cls.openings
        calls = (
            HeldCall(call.name, (words(call.parts[0].text.removeprefix(opening)), *call.parts[1:]))
            for call in whole.calls
        )
        return (HeldCalls(opening, "", tuple(calls), None, ""),)

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        draft = out.draft(source)
        draft.begin((yield from _quoted(source)))
        yield from self._arguments(source, draft)
        draft.close()

    def _argument(self, source: Source, draft: Draft) -> Reading[None]:
        key = yield from _quoted(source)
        yield from self.tags.read(source, draft, key)


class DeepSeekV32(MiniMaxM2):
    """Its template may not show calls: their form is of the prompts' encoder. Some models write
    JSON in place of parameters.
    """

    recognized_by = (_DSML,)
    special_tokens = (_DSML,)
    openings = (f"<{_DSML}function_calls>",)
    closing = (f"</{_DSML}invoke>", f"</{_DSML}function_calls>")
    call = f'<{_DSML}invoke name="'
    tags = Tags(
        f'<{_DSML}parameter name="',
        '" string="',
        f"</{_DSML}parameter>",
        kinds=('true">', 'false">'),
    )
    argument = tags.begin

    def _arguments(self, source: Source, draft: Draft) -> Reading[None]:
        yield from source.blanks()
        if (yield from source.peek()) == "{":
            yield from json_arguments(source, draft)
        yield from super()._arguments(source, draft)

    def _argument(self, source: Source, draft: Draft) -> Reading[None]:
        given = yield from _attributes(source)
        key, middle, kind = f"{given}>".rpartition(self.tags.middle)
        if not middle or self.tags.kinds is None or kind not in self.tags.kinds:
            raise Broken
        yield from self.tags.read(source, draft, key, is_text=kind == self.tags.kinds[0])


class DeepSeekV4(DeepSeekV32):
    """Other marks around all calls."""

    recognized_by = (f"{_DSML}tool_calls",)
    openings = (f"<{_DSML}tool_calls>",)
    closing = (f"</{_DSML}invoke>", f"</{_DSML}tool_calls>")


def _attributes(source: Source) -> Reading[str]:
    """What stands in a tag up to its end; a name may hold quotation marks itself."""
    given = yield from source.run(_NAME)
    yield from source.expect(">")
    return given


def _quoted(source: Source) -> Reading[str]:
    """The name that a tag's last attribute gives, with either quotation marks, and its end."""
    mark = yield from source.expect('"', "'")
    given = yield from _attributes(source)
    if not given.endswith(mark):
        raise Broken
    return given[:-1]


def _unquoted(given: str) -> str:
    """The name that the last attribute of a tag gives."""
    if not given.endswith('"'):
        raise Broken
    return given[:-1]
