"""EBNF by xgrammar, which follows every way to read a text. llguidance cuts it into longest words
first, and so loses some of the texts that a grammar allows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from actors.stage.grammars.matcher import Matcher

_MAX_CACHE_BYTES: Final = 256 << 20


class EbnfCompiler:
    """texts: bytes of each token, empty for special ones."""

    def __init__(self, texts: Sequence[bytes], stop_token_ids: Sequence[int]) -> None:
        import xgrammar

        info = xgrammar.TokenizerInfo(
            list(texts), vocab_type=xgrammar.VocabType.RAW, stop_token_ids=list(stop_token_ids)
        )
        self._num_words = -(-len(texts) // 32)
        self._compiler = xgrammar.GrammarCompiler(
            info, max_threads=1, cache_limit_bytes=_MAX_CACHE_BYTES
        )

    def compile(self, grammar: str) -> Callable[[], Matcher]:
        """Gives matchers of a grammar. Raises ValueError where it is none."""
        import xgrammar

        try:
            compiled = self._compiler.compile_grammar(grammar)
        except RuntimeError as bad:
            raise ValueError(_reason(str(bad))) from bad
        return lambda: _EbnfMatcher(xgrammar.GrammarMatcher(compiled), self._num_words)


class _EbnfMatcher:
    is_lost = False

    def __init__(self, matcher: Any, num_words: int) -> None:
        self._matcher, self._num_words = matcher, num_words

    @property
    def is_over(self) -> bool:
        return bool(self._matcher.is_terminated())

    def mask(self) -> NDArray[np.uint32]:
        words_1W = np.full((1, self._num_words), -1, np.int32)
        self._matcher.fill_next_token_bitmask(words_1W)
        return words_1W[0].view(np.uint32)

    def take(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    def go_back(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)


def _reason(error: str) -> str:
    """In one line, without a time stamp and a source file."""
    line = error.strip().splitlines()[0] if error.strip() else "it is no grammar"
    return re.sub(r"^\[[^]]*\] \S+:\d+: ", "", line)[:300].rstrip(". ")
