"""Log-probabilities that are written as they come are those that would be written at once."""

from __future__ import annotations

import json
import math

import pytest

from actors.scheduling.plan import TokenLogprobs
from app.api.endpoints.logprobs import ChatColumn, TokenTexts, chat_logprobs
from app.text.processor import TextProcessor


@pytest.mark.parametrize("num_top", [0, 3])
def test_a_chats_column_is_its_list(text: TextProcessor, num_top: int) -> None:
    tokens = [*range(0, text.vocab_size, 7), 195, 34, 92]  # half characters, quotes, backslashes
    values = [-0.0, -1.25, -1e-9, -math.inf, -12345.678]
    entries = [
        (
            TokenLogprobs(
                token, values[n % 5], 1, tuple((t, values[t % 5]) for t in tokens[n : n + 4])
            ),
            n,
        )
        for n, token in enumerate(tokens)
    ]
    column = ChatColumn(TokenTexts(text), num_top)
    for start in range(0, len(entries), 10):
        column.add(entries[start : start + 10])
    wanted = json.dumps(chat_logprobs(text, entries, num_top))
    assert b"".join(column.written()).decode() == wanted
