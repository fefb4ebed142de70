"""A grammar that holds for the answer alone: behind the reasoning, and unless it calls tools; and
one that holds for the calls alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from actors.scheduling.request import Frame, HeldCall, HeldCalls

_BLANKS: Final = r"/[ \n\r\t]{1,4}/"
_ANY: Final = "/(?s:.+)/"


def rules_of(
    answer: str | None,
    frame: Frame,
    token_ids: Mapping[str, int],
    schema_rule: Callable[[str | None], str],
) -> tuple[str, str]:
    """The rule of a framed answer, and those that it needs (in Lark's form, as llguidance has it).

    answer: its own rule; None: any text. token_ids: of special tokens, by name. schema_rule: gives
    the rule of a JSON schema, or of any object.
    """
    rules = [f"blanks: {_BLANKS}"]
    start = "answer"
    if frame.held:
        rules += _held_rules(frame.held, token_ids, schema_rule)
    if answer is not None:
        rules.append(f"answer: {answer}")
        if frame.calls:
            start = "(answer | calls)"
            rules += _calls_in_its_place(frame, token_ids)
    else:
        rules += _calls_within_text(frame, token_ids)
    if frame.reasoning:
        opening, closing = frame.reasoning
        head = "begun"
        if frame.is_begun:  # some models write the prompt's mark once more
            start, head = f"reasoning {start}", "begun?" if opening in token_ids else ""
        else:
            start = f"reasoning? {start}"
        if opening in token_ids:
            rules.append(f"begun: blanks? {_mark(opening, token_ids)}")
        else:  # at once, so that it is no text of an answer
            rules.append(f"begun[lazy]: /[ \\n\\r\\t]{{0,4}}{literal(opening)}/")
        rules.append(f"reasoning: {head} thoughts blanks?")
        if closing in token_ids:
            rules.append(f"thoughts: {_ANY}? {_mark(closing, token_ids)}")
        else:  # up to the first one
            rules.append(f"thoughts[lazy]: {_up_to(closing)}")
    return start, "\n".join(rules)


def _calls_in_its_place(frame: Frame, token_ids: Mapping[str, int]) -> list[str]:
    if frame.held:
        block = " | ".join(
            f"{_mark(held.opening, token_ids)} held{n}" for n, held in enumerate(frame.held)
        )
        return [f"block: {block}", "calls: block (blanks? block)*"]
    marks = {token_ids[mark] for mark in (*frame.calls, *frame.marks) if mark in token_ids}
    rest = " | ".join([_ANY, *_tokens(marks)])
    calls = " | ".join(_mark(mark, token_ids) for mark in frame.calls)
    return [f"calls: ({calls}) rest", f"rest: ({rest})*"]


def _calls_within_text(frame: Frame, token_ids: Mapping[str, int]) -> list[str]:
    """Whatever stands between calls, where each opening begins one, as a token and spelled."""
    openings = list(dict.fromkeys(held.opening for held in frame.held))
    begins = {opening: token_ids[opening] for opening in openings if opening in token_ids}
    others = set(token_ids.values()).difference(begins.values())
    if frame.reasoning:
        others.discard(token_ids.get(frame.reasoning[0], -1))
    rules = [f"text: ({' | '.join([_ANY, *_tokens(others)])})*"]
    blocks = []
    for number, opening in enumerate(openings):
        rules.append(f"spelled{number}[lazy]: {_up_to(opening)}")
        begin = f"text spelled{number}"
        if opening in begins:
            begin = f"({begin} | text {_mark(opening, token_ids)})"
        ways = [f"held{n}" for n, held in enumerate(frame.held) if held.opening == opening]
        blocks.append(f"{begin} ({' | '.join(ways)})")
    return [*rules, f"answer: ({' | '.join(blocks)})* text"]


def _held_rules(
    every: tuple[HeldCalls, ...],
    token_ids: Mapping[str, int],
    schema_rule: Callable[[str | None], str],
) -> list[str]:
    """A rule of each way to write calls, behind its opening, and those of the arguments."""
    schemas: dict[str | None, str] = {}
    for call in (call for held in every for call in held.calls):
        schemas.setdefault(call.schema, f"arguments{len(schemas)}")

    def written(call: HeldCall) -> str:
        before, after = _spelled(call.before, token_ids), _spelled(call.after, token_ids)
        return f"{before} {schemas[call.schema]} {after}"

    rules = [f"{name}: {schema_rule(schema)}" for schema, name in schemas.items()]
    for number, held in enumerate(every):
        rules.append(f"call{number}: {' | '.join(map(written, held.calls))}")
        following = ""
        if held.separator is not None:
            following = f"({_spelled(held.separator, token_ids)} call{number})*"
        head, tail = _edge(held.head, token_ids), _edge(held.tail, token_ids)
        rules.append(f"held{number}: {head} call{number} {following} {tail}")
    return rules


def _spelled(text: str, token_ids: Mapping[str, int]) -> str:
    """The rule of this very text; special tokens in it are tokens."""
    names = sorted((name for name in token_ids if name in text), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    return " ".join(_mark(part, token_ids) for part in parts if part)


def _edge(text: str, token_ids: Mapping[str, int]) -> str:
    """Its blanks may be missing: models of one family differ in them."""
    rest = text.lstrip()
    blanks = text[: len(text) - len(rest)]
    return f"{f'/{literal(blanks)}/?' if blanks else ''} {_spelled(rest, token_ids)}"


def _mark(mark: str, token_ids: Mapping[str, int]) -> str:
    token = token_ids.get(mark)
    return f"/{literal(mark)}/" if token is None else f"<[{token}]>"


def _tokens(ids: set[int]) -> list[str]:
    return [f"<[{','.join(map(str, sorted(ids)))}]>"] if ids else []


def _up_to(mark: str) -> str:
    return f"/(?s:.*){literal(mark)}/"


def literal(text: str) -> str:
    """A pattern of this text alone.

    >>> literal("a b")
    'a\\\\x20b'
    """
    return "".join(c if c.isalnum() or ord(c) > 127 else f"\\x{ord(c):02x}" for c in text)
