"""A grammar that holds for the answer alone: behind the reasoning, and unless it calls tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from actors.scheduling.request import Frame

_BLANKS: Final = r"/[ \n\r\t]{1,4}/"
_ANY: Final = "/(?s:.+)/"


def rules_of(answer: str, frame: Frame, token_ids: Mapping[str, int]) -> tuple[str, str]:
    """The rule of a framed answer, and those that it needs (in Lark's form, as llguidance has it).

    answer: its own rule. token_ids: of special tokens, by name.
    """
    rules = [f"answer: {answer}", f"blanks: {_BLANKS}"]
    start = "answer"
    if frame.calls:
        start = "(answer | calls)"
        marks = {token_ids[mark] for mark in (*frame.calls, *frame.marks) if mark in token_ids}
        rest = " | ".join([_ANY, *(f"<[{token}]>" for token in sorted(marks))])
        calls = " | ".join(_mark(mark, token_ids) for mark in frame.calls)
        rules += [f"calls: ({calls}) rest", f"rest: ({rest})*"]
    if frame.reasoning:
        opening, closing = frame.reasoning
        head = f"blanks? {_mark(opening, token_ids)}"
        if frame.is_begun:  # some models write the prompt's mark once more
            start, head = f"reasoning {start}", f"({head})?" if opening in token_ids else ""
        else:
            start = f"reasoning? {start}"
        rules.append(f"reasoning: {head} thoughts blanks?")
        if closing in token_ids:
            rules.append(f"thoughts: {_ANY}? {_mark(closing, token_ids)}")
        else:  # up to the first one
            rules.append(f"thoughts[lazy]: /(?s:.*){literal(closing)}/")
    return start, "\n".join(rules)


def _mark(mark: str, token_ids: Mapping[str, int]) -> str:
    token = token_ids.get(mark)
    return f"/{literal(mark)}/" if token is None else f"<[{token}]>"


def literal(text: str) -> str:
    """A pattern of this text alone.

    >>> literal("a b")
    'a\\\\x20b'
    """
    return "".join(c if c.isalnum() or ord(c) > 127 else f"\\x{ord(c):02x}" for c in text)
