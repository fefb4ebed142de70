"""Texts as rules, with special tokens and without."""

from __future__ import annotations

from actors.stage.grammars.spelling import any_of, around_token, has_token, spelled

TOKENS = {"<a>": 7, "<a>b": 8, "|c|": 9}


def test_the_longest_special_token_is_a_token() -> None:
    assert spelled("x<a>b|c|", TOKENS) == "/x/ <[8]> <[9]>"
    assert spelled("<", TOKENS) == r"/\x3c/"
    assert any_of({9, 7}) == ["<[7,9]>"]
    assert any_of(set()) == []


def test_a_text_is_x_its_first_token() -> None:
    assert around_token("x|c|y<a>", TOKENS) == ("x", "|c|", "y<a>")
    assert around_token("<a>b", TOKENS) == ("", "<a>b", "")
    assert around_token("xy", TOKENS) == ("xy", "", "")
    assert has_token("x<a>", TOKENS)
    assert not has_token("x", TOKENS)
