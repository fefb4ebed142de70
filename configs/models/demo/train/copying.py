"""Exercises in looking back: random tokens, said twice.

Nothing but copying predicts the second half, so the attention heads that find and repeat what
was said before form in a few hundred steps. Conversations alone take many times longer to teach it,
and until they exist a model of this size answers "Nice to meet you" with somebody else's name.
"""

import numpy as np
import numpy.typing as npt
from rows import Rows

NUM_SPECIAL_TOKENS = 3


def look_back_rows(rng: np.random.Generator, num_rows: int, length: int, vocab_size: int) -> Rows:
    """Rows of `length + 1` tokens; only what is said again counts."""
    width = length + 1
    tokens = rng.integers(NUM_SPECIAL_TOKENS, vocab_size, (num_rows, width), dtype=np.uint16)
    counted = np.zeros((num_rows, width), dtype=np.bool_)
    for row in range(num_rows):
        _repeat_within(rng, tokens[row], counted[row])
    return Rows(tokens, counted)


def _repeat_within(
    rng: np.random.Generator, tokens: npt.NDArray[np.uint16], counted: npt.NDArray[np.bool_]
) -> None:
    start = 0
    while True:
        span = int(rng.integers(4, 40))
        gap = int(rng.integers(0, 12))
        again = start + span + gap
        end = min(again + span, len(tokens))
        if end - again < 2:
            return
        tokens[again:end] = tokens[start : start + end - again]
        counted[again + 1 : end] = True  # the first token of the second saying cannot be known
        start = end
