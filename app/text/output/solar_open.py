"""Solar Open: a turn each for reasoning, text and calls, which begin and end with marks.

<|think|>I add.<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>a1b2c3d4e5
<|tool_call:name|>add<|tool_call:args|>{"a": 1}<|tool_call:end|><|calls|>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

from actors.scheduling.request import HeldCall, HeldCalls, HeldPart
from app.text.output.interface import ToolFormat, ending, maybe_end
from app.text.output.json_text import Calls, json_arguments, words
from app.text.output.pieces import AnswerPart, AnswerPieces
from app.text.output.source import Reading, Source
from app.text.output.thinking import Think

_TURN, _TEXT, _TURN_END = "<|begin|>assistant", "<|content|>", "<|end|>"
_ALL, _ONE, _ONE_END = "<|tool_calls|>", "<|tool_call:begin|>", "<|tool_call:end|>"
_ALL_END: Final = "<|calls|>"  # which the tokenizer may take for the answer's end
_NAME, _ARGUMENTS = "<|tool_call:name|>", "<|tool_call:args|>"
_NOT_MARK: Final = re.compile(r"[^<]+")
_ID: Final = HeldPart("until", _NAME, (HeldPart("match", "[a-z0-9]{10}"),))


class SolarThink(Think):
    """Reasoning, and the answer without the marks of its turns, wherever they stand. Of a prompt
    that has switched it off, some reason still.
    """

    opening = "<|think|>"
    closing = _TURN_END
    recognized_by = (f"{_TURN}<|think|>",)
    special_tokens = ("<|think|>", "<|begin|>", _TURN_END, _TEXT)
    heads = (_TEXT, "")

    @classmethod
    def marks(cls, prompt: str) -> tuple[str, ...]:
        return (cls.opening, f"{_TURN_END}{_TURN}")

    def read(self, source: Source, out: AnswerPieces) -> Reading[None]:
        yield from super().read(source, out)
        source.left_out = (_TURN, _TEXT, _TURN_END)
        out.part = AnswerPart.ANSWER
        start = source.at
        yield from source.blanks()
        if not (yield from source.sees(*source.left_out)):
            source.at = start


class SolarOpen(ToolFormat):
    """Calls have ids, of ten letters and digits."""

    recognized_by = (_ONE,)
    special_tokens = (_ALL, _ONE, _NAME, _ARGUMENTS, _ONE_END, _ALL_END)
    openings = (_ALL, _ONE)
    closing = (_ONE_END, _ALL_END)

    @staticmethod
    def written(calls: Calls) -> str:
        texts = [
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            for _, arguments in calls
        ]
        ones = [
            f"{_ONE}call{number:06d}{_NAME}{name}{_ARGUMENTS}{text}{_ONE_END}"
            for number, ((name, _), text) in enumerate(zip(calls, texts, strict=True))
        ]
        return f"{_ALL}{''.join(ones)}" if ones else ""

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        bare = tuple(
            HeldCall(
                name,
                (_ID, words(f"{name}{_ARGUMENTS}"), HeldPart("json", schema), words(_ONE_END)),
            )
            for name, schema in schemas.items()
        )
        whole = tuple(HeldCall(call.name, (words(_ONE), *call.parts)) for call in bare)
        return (HeldCalls(_ALL, "", whole, "", ""), HeldCalls(_ONE, "", bare, None, ""))

    @classmethod
    def forced(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        return cls.held(schemas)[:1]

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        if opening == _ALL:
            yield from source.blanks()
            yield from source.expect(_ONE)
        while True:
            draft = out.draft(source)
            yield from source.run(_NOT_MARK)
            yield from source.expect(_NAME)
            draft.begin((yield from source.run(_NOT_MARK)).strip())
            yield from source.expect(_ARGUMENTS)
            yield from source.blanks()
            yield from json_arguments(source, draft)
            yield from ending(source, _ONE_END, _ONE, _ALL_END)
            draft.close()
            yield from source.blanks()
            if not (yield from source.accept(_ONE)):
                break
        yield from maybe_end(source, _ALL_END)
