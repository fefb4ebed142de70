"""Texts as rules: special tokens in them are tokens, all else is spelled."""

from __future__ import annotations

import re
from collections.abc import Mapping

from actors.stage.grammars.patterns import literal


def _mark(mark: str, token_ids: Mapping[str, int]) -> str:
    token = token_ids.get(mark)
    return f"/{literal(mark)}/" if token is None else f"<[{token}]>"


def has_token(text: str, token_ids: Mapping[str, int]) -> bool:
    return any(name in text for name in token_ids)


def spelled(text: str, token_ids: Mapping[str, int]) -> str:
    """The rule of this very text; special tokens in it are tokens."""
    names = sorted((name for name in token_ids if name in text), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    return " ".join(_mark(part, token_ids) for part in parts if part)


def any_of(ids: set[int]) -> list[str]:
    return [f"<[{','.join(map(str, sorted(ids)))}]>"] if ids else []


def around_token(text: str, token_ids: Mapping[str, int]) -> tuple[str, str, str]:
    """What precedes the first special token in a text, the token, and the rest; if there is none,
    the text is all that precedes it."""
    names = sorted((name for name in token_ids if name in text), key=len, reverse=True)
    found = re.search("|".join(map(re.escape, names)), text) if names else None
    if found is None:
        return text, "", ""
    return text[: found.start()], found[0], text[found.end() :]
