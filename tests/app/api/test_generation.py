"""How a chunk of many log-probabilities is taken: in parts, of which nothing is lost or doubled."""

from __future__ import annotations

import pytest

from actors.scheduling.plan import TokenLogprobs
from actors.scheduling.request import FinishReason
from app.api.generation import _PART_VALUES, _parts
from app.engine_client.client import TokenChunk


@pytest.mark.parametrize("num_tokens", [1, 47, 48, 500])
@pytest.mark.parametrize("num_top", [0, 20])
def test_parts_are_the_chunk(num_tokens: int, num_top: int) -> None:
    top = tuple((token, -1.0) for token in range(num_top))
    logprobs = [TokenLogprobs(token, -0.5, 1, top) for token in range(num_tokens)]
    chunk = TokenChunk(2, 7, list(range(num_tokens)), FinishReason.LENGTH, 3, logprobs)
    parts = list(_parts(chunk))
    assert [token for part in parts for token in part.tokens] == chunk.tokens
    assert [found for part in parts for found in part.logprobs] == logprobs
    assert [part.first for part in parts] == [7 + part.tokens[0] for part in parts]
    assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert (parts[-1].finish_reason, parts[-1].index) == (FinishReason.LENGTH, 2)
    assert max(len(part.tokens) for part in parts) * (1 + num_top) <= _PART_VALUES


def test_a_chunk_without_them_stays_whole() -> None:
    chunk = TokenChunk(0, 0, list(range(5000)))
    assert list(_parts(chunk)) == [chunk]
