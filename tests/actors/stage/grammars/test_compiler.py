from __future__ import annotations

from pathlib import Path

import pytest

from actors.scheduling.request import Grammar
from actors.stage.grammars.compiler import GrammarCompiler
from tests.tiny_tokenizers import byte_level_folder, sentencepiece_folder, wordpiece_folder


@pytest.mark.parametrize("make", [byte_level_folder, sentencepiece_folder, wordpiece_folder])
@pytest.mark.parametrize(
    "grammar", [Grammar("regex", "(a b|)"), Grammar("ebnf", 'root ::= "a b"?')]
)
def test_tokens_of_any_make_are_masked(tmp_path: Path, make: object, grammar: Grammar) -> None:
    """By each library, in a vocabulary that is larger or smaller than the tokenizer's."""
    folder = make(tmp_path)  # type: ignore[operator]
    own = GrammarCompiler.of_folder(folder)
    first = {text for text in own.texts if text and b"a b".startswith(text)}
    for size in (len(own.texts) + 70, len(own.texts) - 3):
        compiler = GrammarCompiler.of_folder(folder, size, (size - 1,))
        assert len(compiler.texts) == size
        matcher = compiler.compile(grammar)()
        allowed = {t for t in range(size) if matcher.mask()[t // 32] >> (t % 32) & 1}
        assert {compiler.texts[t] for t in allowed} - {b""} == first & set(compiler.texts)
        assert size - 1 in allowed
