"""Counts that follow a text by differences are those of the text."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.token_counts import TokenCounts


def check(counts: TokenCounts, prompt: NDArray[np.int32], output: NDArray[np.int32]) -> None:
    counts.advance(prompt, output)
    ids = counts.ids.tolist()
    assert len(set(ids)) == len(ids)
    assert [counts.place(token) for token in ids] == [*range(len(ids))]
    for found, text in (
        (counts.totals, [*prompt.tolist(), *output.tolist()]),
        (counts.in_output, output.tolist()),
    ):
        assert {t: n for t, n in zip(ids, found.tolist(), strict=True) if n} == Counter(text)


@pytest.mark.parametrize("num_prompt", [0, 1, 300])
@pytest.mark.parametrize("vocabulary", [3, 1000])
def test_a_text_that_grows_by_tokens_and_drafts(num_prompt: int, vocabulary: int) -> None:
    """Drafts are counted draw by draw; the text then goes on behind those that were right."""
    rng = np.random.default_rng(num_prompt + vocabulary)
    counts = TokenCounts()
    prompt, output = (rng.integers(0, vocabulary, n).astype(np.int32) for n in (num_prompt, 0))
    for _ in range(60):
        drafts = rng.integers(0, vocabulary, rng.integers(0, 5)).astype(np.int32)
        for num_drafts in range(len(drafts) + 1):
            check(counts, prompt, np.concatenate((output, drafts[:num_drafts])))
        kept = drafts[: rng.integers(0, len(drafts) + 1)]
        token = rng.integers(0, vocabulary, 1).astype(np.int32)
        output = np.concatenate((output, kept, token))
    check(counts, prompt, output)  # a step that is repeated
    check(counts, prompt, output[:-7])
    check(counts, np.concatenate((prompt, output[:4])), output[4:])  # started again
    check(counts, prompt[:1] + 1, output[:0])


def test_the_text_may_change_in_place() -> None:
    """It is a view of the stage's tokens: what was counted is known without it."""
    counts, text = TokenCounts(), np.array([5, 6, 7, 8], np.int32)
    check(counts, text[:2], text[2:])
    text[3] = 7
    check(counts, text[:2], text[2:])
    text[0] = 9
    check(counts, text[:2], text[2:])


def test_only_what_is_new_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work of a draw by the tokens that are looked up, not by those of the text."""
    counts, text = TokenCounts(), np.arange(5000, dtype=np.int32) % 700
    check(counts, text[:1000], text[1000:2000])
    looked_up: list[int] = []

    class Places(dict[int, int]):
        def get(self, token: int, default: int | None = None) -> int | None:  # type: ignore[override]
            looked_up.append(token)
            return super().get(token, default)

    def begin(self: TokenCounts, prompt: NDArray[np.int32]) -> None:
        raise AssertionError("the text is counted anew")

    monkeypatch.setattr(TokenCounts, "_begin", begin)
    counts._places = Places(counts._places)
    for end in range(2001, 2011):
        counts.advance(text[:1000], text[1000:end])
    assert looked_up == text[2000:2010].tolist()
