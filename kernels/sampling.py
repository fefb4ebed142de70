"""What sampling is asked for and what it tells; `kernels.torch.sampling` defines the semantics.

Shape suffixes: S rows that sample, R rows of logits, K likeliest tokens, W words of a bit mask.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.token_counts import TokenCounts

# (logprob_R, rank_R of each row's token; top_RK, ids_RK of the likeliest).
ChosenLogprobs = tuple[
    NDArray[np.float32], NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]
]


@dataclass(slots=True)
class SamplingRows:
    """Sampling parameters by row. position_S: of the token to be drawn, within its sequence."""

    temperature_S: NDArray[np.float32]
    top_k_S: NDArray[np.int32]  # 0: off
    top_p_S: NDArray[np.float32]
    min_p_S: NDArray[np.float32]
    seed_S: NDArray[np.int64]
    position_S: NDArray[np.int64]

    def uncut(self) -> SamplingRows:
        """The same rows without top_k, top_p and min_p."""
        return replace(
            self,
            top_k_S=np.zeros_like(self.top_k_S),
            top_p_S=np.ones_like(self.top_p_S),
            min_p_S=np.zeros_like(self.min_p_S),
        )


@dataclass(slots=True)
class Adjustment:
    """Logits processing of one row: biases, penalties, masks. Ids are within the vocabulary.

    allowed_W: int32 bit mask of the grammar, lowest bit the lowest id; None allows everything.
    forbidden: ids that may not be drawn (stop tokens before min_tokens).
    counts: of the request, from its last draw.
    """

    row: int
    prompt: NDArray[np.int32]
    output: NDArray[np.int32]
    bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    forbidden: tuple[int, ...] = ()
    allowed_W: torch.Tensor | None = None
    counts: TokenCounts = field(default_factory=TokenCounts)

    @property
    def counts_output(self) -> bool:
        """Whether tokens of the output are penalized as such."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def counted(self) -> TokenCounts | None:
        """The counts of what is penalized, until the next draw of the request; None: nothing is.
        The prompt is counted for the repetition penalty alone."""
        repeats = self.repetition_penalty != 1.0
        if not repeats and not self.counts_output:
            return None
        self.counts.advance(self.prompt if repeats else self.prompt[:0], self.output)
        return self.counts


def or_minus_one(drawn_S: torch.Tensor, logits_SV: torch.Tensor) -> torch.Tensor:
    """The tokens; -1 where a token's logit is not finite. Samplers draw such a token in every row
    that has a NaN, or whose highest logit is not finite."""
    at_S1 = drawn_S.long().clamp(0, logits_SV.shape[1] - 1)[:, None]
    is_finite_S = torch.isfinite(logits_SV.gather(1, at_S1))[:, 0]
    return drawn_S.masked_fill(~is_finite_S, -1)
