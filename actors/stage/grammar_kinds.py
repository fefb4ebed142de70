"""What each kind of `Grammar` means to xgrammar, said once for stages and for those who check."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

# JSON is written on one line, as json.dumps does. Free blanks are an invitation: a small model
# accepts it for ever and the value never ends; and every blank is a token somebody waits for.
_LAYOUT: Final = {"any_whitespace": False, "separators": (", ", ": ")}
_ANY_OBJECT: Final = '{"type":"object"}'


def compile_grammar(compiler: Any, kind: str, text: str) -> Any:
    """Compile a grammar's kind and text; raises what xgrammar raises, ValueError among them."""
    match kind:
        case "json_object":
            return compiler.compile_json_schema(_ANY_OBJECT, **_LAYOUT)
        case "json_schema":
            return compiler.compile_json_schema(text, **_LAYOUT)
        case "regex":
            return compiler.compile_regex(text)
        case "ebnf":
            return compiler.compile_grammar(text)
        case "choice":
            return compiler.compile_grammar(ebnf_of_choices(_choices(text)))
    raise ValueError(f"grammar kind {kind!r} is unknown")


def ebnf_of_choices(choices: Sequence[str]) -> str:
    """A grammar (GBNF, as xgrammar reads it) of exactly these strings.

    >>> ebnf_of_choices(["yes", "no"])
    'root ::= "yes" | "no"'
    """
    return "root ::= " + " | ".join(_literal(choice) for choice in choices)


def _choices(text: str) -> list[str]:
    choices = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) for c in choices):
        raise ValueError("choices must be a non-empty JSON list of strings")
    return choices


def _literal(text: str) -> str:
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(escapes.get(char, char) for char in text) + '"'
