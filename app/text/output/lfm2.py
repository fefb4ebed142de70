"""LFM2: a list of calls in Python's syntax between marks, or of JSON if the prompt asks for it.

<|tool_call_start|>[add(a=1, b="x"), now()]<|tool_call_end|>

MiniCPM3 writes a block of code between the same marks, and reasons between `<|thought_start|>` and
`<|thought_end|>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Final

from actors.scheduling.request import HeldCall, HeldCalls
from app.text.output.interface import maybe_end
from app.text.output.json_text import Calls, JsonWriting, maybe, words
from app.text.output.pieces import AnswerPieces
from app.text.output.pythonic import Pythonic
from app.text.output.source import Reading, Source
from app.text.output.thinking import Think

_BEGIN, _END = "<|tool_call_start|>", "<|tool_call_end|>"
_LIST: Final = JsonWriting(f"{_BEGIN}[", f"]{_END}")
_BLOCK, _BLOCK_END = "```python\n", "\n```\n"
_SHOWS_BLOCK: Final = re.compile(rf"{re.escape(_BEGIN)}(\\n|\s)*```python")  # a chat template


class Lfm2(Pythonic):
    """Values are literals of Python or of JSON. Reads both lists, and a block of code."""

    # The second stands where tools are declared, the third is a variable; such templates leave
    # calls out.
    recognized_by: ClassVar[tuple[str, ...]] = (_BEGIN, "<|tool_list_start|>", "keep_past_thinking")
    special_tokens = (_BEGIN, _END)
    openings = (_BEGIN,)
    closing = (_END,)
    is_bare = False
    part = "python_or_json"

    @staticmethod
    def written(calls: Calls) -> str:
        return f"{_BEGIN}{Pythonic.written(calls)}{_END}" if calls else ""

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        """Unlike others of this syntax these have marks, so that no text begins as they do. JSON
        keeps to the schemas that Python's syntax cannot.
        """
        called = super().held(schemas)[0].calls
        calls = tuple(HeldCall(one.name, (maybe(words(" ")), *one.parts)) for one in called)
        listed = HeldCalls(_BEGIN, "[", calls, ",", f"]{_END}", may_lack=True)
        return (listed, _LIST.held(_BEGIN, schemas))

    @classmethod
    def forced(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        """In JSON, which keeps to any schema."""
        return (_LIST.held(_BEGIN, schemas),)

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        yield from source.blanks()
        has_block = bool((yield from source.accept("```")))
        if has_block:
            yield from source.accept("python")
        yield from source.blanks()
        is_list = bool((yield from source.accept("[")))
        yield from source.blanks()
        if is_list and (yield from source.peek()) == "{":
            yield from self.read_list(source, out, opening)
        elif is_list:
            yield from self._list(source, out, opening)
        else:
            yield from self._lines(source, out)
        if has_block:
            yield from source.blanks()
            yield from source.accept("```")
        yield from maybe_end(source, _END)


class MiniCPM3(Lfm2):
    """The marks hold a block of code with a call a line."""

    @classmethod
    def is_of(cls, template: str) -> bool:
        return _SHOWS_BLOCK.search(template) is not None

    @staticmethod
    def written(calls: Calls) -> str:
        ones = [Pythonic.written([call])[1:-1] for call in calls]  # without the brackets of a list
        code = "\n".join(ones)
        return f"{_BEGIN}\n{_BLOCK}{code}{_BLOCK_END}{_END}" if ones else ""

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        listed, in_json = super().held(schemas)
        tail = f"{_BLOCK_END}{_END}"
        return (replace(listed, head=f"\n{_BLOCK}", separator="\n", tail=tail), in_json)

    @classmethod
    def forced(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        return ()


class MiniCPM3Think(Think):
    """What precedes calls or the answer."""

    opening = "<|thought_start|>"
    closing = "<|thought_end|>"
    recognized_by = ("<|thought_start|>",)
    special_tokens = ("<|thought_start|>", "<|thought_end|>")
