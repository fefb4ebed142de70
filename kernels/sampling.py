"""What sampling is asked for and what it tells; `kernels.torch.sampling` defines the semantics.

Shape suffixes: S rows that sample, R rows of logits, K likeliest tokens, W words of a bit mask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

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
