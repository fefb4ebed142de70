"""A backend's support for a stage's CUDA graphs; shape suffixes as in `kernels.interface`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.layer_weights import Experts
from kernels.sampling import SamplingRows


@dataclass(frozen=True, slots=True)
class GraphSupport:
    """The functions of a backend that a stage captures in CUDA graphs.

    hybrid: batches with prefill chunks can be captured as well as decodes (see Batch.captured).
    pack_rows: sampling parameters -> (S, 3) float64 on the host, for one transfer.
    draw: (logits_SV, packed_S3 on the device, first_id) -> float64 scores_S and int32 tokens_S, as
        `Backend.gumbel_argmax`, but on the device; no synchronization. Whole logits (first_id is 0)
        may have rows with top_k, top_p and min_p.
    gather_logprobs: as `Backend.chosen_logprobs`, but the result stays on the device; no
        synchronization.
    holds_experts: whether a mixture can be captured; False where what it launches depends on the
        routing.
    adapter_rows: rows of a tile of adapters (`kernels.adapters.tiles_of`).
    """

    hybrid: bool
    pack_rows: Callable[[SamplingRows], NDArray[np.float64]]
    draw: Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
    gather_logprobs: Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, ...]]
    holds_experts: Callable[[Experts], bool]
    adapter_rows: int = 16
