"""An answer read by one format, in one cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from app.text.output.pieces import AnswerPiece, Tools, gathered
from app.text.output.registry import OutputFormats

NUMBER = {"type": "number"}
TOOLS: dict[str, dict[str, Any]] = {
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
        "required": ["a"],
    },
    "now": {},
    "plot": {
        "properties": {
            "points": {"type": "array"},
            "scale": NUMBER,
            "grid": {"type": "boolean"},
            "title": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "style": {},
        }
    },
}
Read = tuple[str, str, list[tuple[str, Any]]]  # text, reasoning, calls
CUTS = st.lists(st.integers(0, 400), max_size=12)


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted(min(place, len(text)) for place in cuts)
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def pieces_of(
    formats: OutputFormats,
    texts: Sequence[str],
    *,
    by_argument: bool,
    tools: Tools = TOOLS,
    is_forced: bool = False,
    in_reasoning: bool = False,
) -> list[AnswerPiece]:
    parser = formats.parser(
        tools, is_forced=is_forced, by_argument=by_argument, in_reasoning=in_reasoning
    )
    found = [piece for text in texts for piece in parser.push([text])]
    found += parser.finish()
    assert parser.num_calls == len(gathered(found)[2])
    return found


def read(
    formats: OutputFormats,
    texts: Sequence[str],
    *,
    by_argument: bool = True,
    tools: Tools = TOOLS,
    is_forced: bool = False,
    in_reasoning: bool = False,
) -> Read:
    """What comes out, every call's arguments parsed: they are JSON whatever was written."""
    text, reasoning, calls = gathered(
        pieces_of(
            formats,
            texts,
            by_argument=by_argument,
            tools=tools,
            is_forced=is_forced,
            in_reasoning=in_reasoning,
        )
    )
    assert all(name in TOOLS for name, _ in calls)
    return text, reasoning, [(name, json.loads(arguments)) for name, arguments in calls]
