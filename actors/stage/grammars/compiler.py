"""Compiles grammars for the tokenizer of a model folder: for the stages and for the API's check."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from actors.scheduling.request import Grammar
from actors.stage.grammars.ebnf import EbnfCompiler
from actors.stage.grammars.guidance import GuidanceCompiler
from actors.stage.grammars.matcher import Matcher
from actors.stage.grammars.tokenizer import read_tokenizer, special_ids
from actors.stage.grammars.vocabulary import bytes_of_tokens


class GrammarCompiler:
    """Not for several threads at a time.

    texts: bytes of each token, empty for special ones and those that only the model has.
    stop_token_ids: the end tokens; the model's, and the tokenizer's. special: tokens by name.
    """

    def __init__(
        self,
        texts: Sequence[bytes],
        stop_token_ids: Sequence[int],
        special: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.texts, self.stop_token_ids = texts, tuple(stop_token_ids)
        self._special = {name: token for name, token in special.items() if token < len(texts)}

    @classmethod
    def of_folder(
        cls, folder: Path, vocab_size: int | None = None, stop_token_ids: Sequence[int] = ()
    ) -> GrammarCompiler:
        """vocab_size, stop_token_ids: the model's. Else the tokenizer's tokens, and one more
        that ends a text.

        Raises ValueError where the folder has no tokenizer for grammars, or no end token.
        """
        try:
            tokenizer = read_tokenizer(folder)
        except (OSError, ValueError) as bad:
            if isinstance(bad, OSError) and bad.errno is not None:
                raise  # no memory, no files: nothing is known of the folder
            raise ValueError(f"{folder} has no tokenizer for grammars: {bad}") from bad
        texts = _texts(tokenizer)
        special = _special(tokenizer)
        if vocab_size is None:
            return cls([*texts, b""], (len(texts),), special)
        texts = [*texts[:vocab_size], *[b""] * (vocab_size - len(texts))]
        # The front stops at the tokenizer's end token, too, whatever the model's files list.
        own = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
        stops = tuple(t for t in dict.fromkeys((*stop_token_ids, *own)) if t < len(texts))
        if not stops:
            raise ValueError("the model names no end-of-sequence token: grammars cannot end")
        return cls(texts, stops, special)

    def compile(self, grammar: Grammar) -> Callable[[], Matcher]:
        """Gives matchers that stand at the beginning. Raises ValueError for what is no grammar."""
        try:
            if grammar.kind == "ebnf":
                return self._ebnf.compile(grammar.text)
            return self._guidance.compile(grammar.kind, grammar.text, grammar.frame)
        except (RuntimeError, ValueError, TypeError) as bad:
            if grammar.kind == "text":
                raise ValueError(f"calls cannot be held to this schema: {bad}") from bad
            if grammar.kind == "strict_json_schema":
                raise ValueError(
                    f"the output cannot be held to this schema: {bad}; leave that out, or 'strict'"
                ) from bad
            raise ValueError(f"{grammar.kind} cannot be compiled: {bad}") from bad

    @cached_property
    def _guidance(self) -> GuidanceCompiler:
        return GuidanceCompiler(self.texts, self.stop_token_ids, self._special)

    @cached_property
    def _ebnf(self) -> EbnfCompiler:
        return EbnfCompiler(self.texts, self.stop_token_ids)


def _texts(tokenizer: Any) -> list[bytes]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # sentencepiece's or tiktoken's own
        import xgrammar

        return list(xgrammar.TokenizerInfo.from_huggingface(tokenizer).decoded_vocab)
    texts = bytes_of_tokens(backend)
    for token in special_ids(tokenizer):
        if token < len(texts):
            texts[token] = b""
    return texts


def _special(tokenizer: Any) -> dict[str, int]:
    names = {token: str(added.content) for token, added in tokenizer.added_tokens_decoder.items()}
    return {names[token]: token for token in special_ids(tokenizer) if token in names}
