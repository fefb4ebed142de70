"""DeepSeek-V3 and R1: a name and a block of JSON between marks; V3.1: a name and an object.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add
```json
{"a": 1}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>
<｜tool▁calls▁end｜>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

from actors.scheduling.request import HeldCalls
from app.text.output.interface import ToolFormat, ending, maybe_end
from app.text.output.json_text import Calls, held_call, json_arguments
from app.text.output.pieces import AnswerPieces
from app.text.output.source import Reading, Source

_ALL, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_ONE, _ONE_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR: Final = "<｜tool▁sep｜>"
_BLOCK: Final = "```"
_WORD: Final = re.compile(r"[^<>{}`\s]+")


class DeepSeekV31(ToolFormat):
    """Reads both forms. The marks around all calls may be missing."""

    recognized_by = (_ONE,)
    special_tokens = (_ALL, _ALL_END, _ONE, _ONE_END, _SEPARATOR)
    openings = (_ALL, _ONE)
    closing = (_ONE_END, _ALL_END)
    # Of one call: what stands before its name and around its arguments; of all: between two.
    before = _ONE
    around = (_SEPARATOR, _ONE_END)
    between = ""

    @classmethod
    def written(cls, calls: Calls) -> str:
        texts = [
            f"{cls.before}{name}{cls.around[0]}{_text(arguments)}{cls.around[1]}"
            for name, arguments in calls
        ]
        return f"{_ALL}{cls.between.join(texts)}{_ALL_END}" if texts else ""

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        begin, end = cls.around
        whole, bare = (
            tuple(
                held_call(name, f"{before}{name}{begin}", schema, end)
                for name, schema in schemas.items()
            )
            for before in (cls.before, cls.before.removeprefix(_ONE))
        )
        return (
            HeldCalls(_ALL, "", whole, cls.between, _ALL_END),
            HeldCalls(_ONE, "", bare, None, ""),
        )

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        if opening == _ALL:
            yield from source.blanks()
            yield from source.expect(_ONE)
        while True:
            draft = out.draft(source)
            yield from source.blanks()
            name = yield from source.run(_WORD)
            yield from source.blanks()
            yield from source.expect(_SEPARATOR)
            yield from source.blanks()
            is_named = (yield from source.peek()) in ("{", '"')
            if not is_named:  # that was its type
                name = yield from source.run(_WORD)
                yield from source.blanks()
            draft.begin(name)
            if has_block := bool((yield from source.accept(_BLOCK))):
                yield from source.accept("json")
            yield from source.blanks()
            yield from json_arguments(source, draft)
            if has_block:
                yield from ending(source, _BLOCK, _ONE_END)
            yield from ending(source, _ONE_END, _ONE, _ALL_END)
            draft.close()
            yield from source.blanks()
            if not (yield from source.accept(_ONE)):
                break
        yield from maybe_end(source, _ALL_END)


class DeepSeekV3(DeepSeekV31):
    """As the former, but writes blocks of JSON."""

    before = f"{_ONE}function{_SEPARATOR}"
    around = (f"\n{_BLOCK}json\n", f"\n{_BLOCK}{_ONE_END}")
    between = "\n"

    @classmethod
    def is_of(cls, template: str) -> bool:
        return f"{_BLOCK}json" in template and super().is_of(template)


def _text(arguments: object) -> str:
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)
