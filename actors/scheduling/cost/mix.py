"""The quantities that determine the time of a micro-batch, summed over its slices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from actors.scheduling.plan import SliceRow, StepShape


def causal_pairs(start: int, num_tokens: int, window: int = 0) -> float:
    """(query, key) pairs of a chunk under the causal mask, each query seeing `window` keys at most.

    >>> causal_pairs(0, 4)
    10.0
    >>> causal_pairs(100, 2, window=50)
    100.0
    """
    if not window or start + num_tokens <= window:
        return num_tokens * (start + (num_tokens + 1) / 2)
    if start >= window:
        return float(num_tokens * window)
    ramp = window - start  # queries that see all keys before them
    return ramp * (start + (ramp + 1) / 2) + (num_tokens - ramp) * float(window)


@dataclass(slots=True)
class Mix:
    """The content of a micro-batch, summed: the inputs of the cost model.

    A slice of one token counts as a decode, even if it is the end of a prompt.

    decode_kv_tokens: sum over decodes of the positions they attend to; of predicted decodes, of
        their contexts, which the cost model cuts at the window.
    prefill_kv_tokens: the same over prefill chunks (each chunk reads its context once).
    prefill_pairs: sum over chunks of (query, key) pairs under the causal mask.
    prefill_squares: sum over chunks of their length squared: the cost of kernels that compute a
        chunk's full square, masked half included.
    beside_move: KV moves beside the step; not in the profile, only learned.
    """

    num_decodes: int = 0
    decode_kv_tokens: int = 0
    num_prefills: int = 0
    prefill_tokens: int = 0
    prefill_kv_tokens: int = 0
    prefill_pairs: float = 0.0
    prefill_squares: int = 0
    beside_move: bool = False

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.prefill_tokens

    @property
    def num_slices(self) -> int:
        return self.num_decodes + self.num_prefills

    def add(self, start: int, num_tokens: int, window: int = 0) -> None:
        """Add the slice [start, start + num_tokens); window > 0 limits how far back it sees."""
        context = start + num_tokens
        if num_tokens == 1:
            self.num_decodes += 1
            self.decode_kv_tokens += min(context, window) if window else context
            return
        self.num_prefills += 1
        self.prefill_tokens += num_tokens
        self.prefill_kv_tokens += min(context, window + num_tokens) if window else context
        self.prefill_pairs += causal_pairs(start, num_tokens, window)
        self.prefill_squares += num_tokens * num_tokens

    @classmethod
    def of(cls, slices: Iterable[SliceRow], window: int = 0) -> Mix:
        """The mix of a plan's slices."""
        mix = cls()
        decodes = kv_tokens = 0
        for _, start, num_tokens, _ in slices:
            if num_tokens == 1:
                decodes += 1
                context = start + 1
                kv_tokens += context if not window or context < window else window
            else:
                mix.add(start, num_tokens, window)
        mix.num_decodes += decodes
        mix.decode_kv_tokens += kv_tokens
        return mix

    @classmethod
    def of_shape(cls, shape: StepShape, window: int = 0) -> Mix:
        """The mix of a step's shape. With a sliding window, decodes see at most a full one."""
        kv_tokens = shape.decode_context_tokens
        if window:
            kv_tokens = min(kv_tokens, shape.num_decodes * window)
        mix = cls(shape.num_decodes, kv_tokens, beside_move=shape.beside_move)
        for start, num_tokens in shape.prefills:
            mix.add(start, num_tokens, window)
        return mix
