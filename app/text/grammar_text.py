"""Small grammars written out as text."""

from __future__ import annotations

from collections.abc import Sequence


def ebnf_of_choices(choices: Sequence[str]) -> str:
    """A grammar (GBNF, as xgrammar reads it) of exactly these strings.

    >>> ebnf_of_choices(["yes", "no"])
    'root ::= "yes" | "no"'
    """
    return "root ::= " + " | ".join(_literal(choice) for choice in choices)


def _literal(text: str) -> str:
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(escapes.get(char, char) for char in text) + '"'
