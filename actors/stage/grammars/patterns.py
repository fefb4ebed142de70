"""Patterns as schemas and clients write them (ECMAScript's), in the syntax of Rust's `regex`."""

from __future__ import annotations

import re
from typing import Final

_PART: Final = re.compile(
    r"(?P<any>\[\^\](?=$|[*+?{)|$]))"  # any character
    r"|\[(?P<class>\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*)\]"
    r"|\\(?P<escaped>.)"
    r"|(?P<around>\(\?<?[=!])",
    re.DOTALL,
)
_IN_CLASS: Final = re.compile(r"\\(?P<escaped>.)|(?P<posix>\[:\w+:\])|\[|&&|~~", re.DOTALL)
# In Rust's syntax, `\<` and `\>` are ends of words, and `\0` is unknown.
_ESCAPES: Final = {"<": "<", ">": ">", "0": r"\x00"}


def as_rust(pattern: str) -> str:
    r"""
    >>> as_rust(r"[^[\]\b]\<[^]*")
    '[^\\[\\]\\x08]<[\\s\\S]*'
    """
    return _PART.sub(_part, pattern)


def looks_around(pattern: str) -> bool:
    """Whether a lookahead or lookbehind is in it, which has no automaton."""
    return any(part["around"] for part in _PART.finditer(pattern))


def _part(found: re.Match[str]) -> str:
    if found["any"]:
        return r"[\s\S]"
    if (inner := found["class"]) is not None:
        return f"[{_IN_CLASS.sub(_of_class, inner)}]"
    escaped = found["escaped"]
    return found[0] if escaped is None else _ESCAPES.get(escaped, found[0])


def _of_class(found: re.Match[str]) -> str:
    if found["posix"]:
        return found[0]
    if found["escaped"] == "b":
        return r"\x08"
    if (escaped := found["escaped"]) is not None:
        return _ESCAPES.get(escaped, found[0])
    return "".join(f"\\{char}" for char in found[0])


def literal(text: str) -> str:
    """A pattern of this text alone.

    >>> literal("a b")
    'a\\\\x20b'
    """
    return "".join(c if c.isalnum() or ord(c) > 127 else f"\\x{ord(c):02x}" for c in text)
