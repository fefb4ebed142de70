from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.stage.grammars.ebnf import EbnfCompiler

END = 256
COMPILER = EbnfCompiler([bytes([byte]) for byte in range(256)] + [b""], (END,))


@given(st.text("abcé", max_size=6))
def test_every_way_to_read_a_text_counts(text: str) -> None:
    """Also where a longer word would swallow what must follow."""
    matcher = COMPILER.compile('root ::= [ab]+ ("b" | "é") tail\ntail ::= "" | "c" tail')()
    taken = all(map(matcher.take, text.encode())) and matcher.take(END)
    assert taken == (re.fullmatch("[ab]+[bé]c*", text) is not None)


def test_a_matcher_goes_back_also_over_its_end() -> None:
    matcher = COMPILER.compile('root ::= "a" "b"*')()
    start = matcher.mask()
    assert [matcher.take(token) for token in (*b"ab", END)] == [True] * 3
    states = [matcher.is_over]
    matcher.go_back(3)
    assert [*states, matcher.is_over] == [True, False]
    assert (matcher.mask() == start).all()


@pytest.mark.parametrize("grammar", ["root ::= missing", "nonsense", ""])
def test_a_bad_grammar_is_named_in_one_line(grammar: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n\[][^\n]+$"):
        COMPILER.compile(grammar)
