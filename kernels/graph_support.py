"""A backend's support for a stage's CUDA graphs; shape suffixes as in `kernels.interface`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.torch_sampling import SamplingRows


@dataclass(frozen=True, slots=True)
class GraphSupport:
    """A backend's functions that CUDA graphs of a stage's steps need.

    hybrid: batches with prefill chunks can be captured as well as decodes (see Batch.captured).
    pack_draws: how rows draw -> (S, 3) float64 on the host, for one transfer.
    draw: (logits_SV, packed_S3 on the device) -> int32 tokens_S; waits for nothing.
    judge: as `Backend.chosen_logprobs`, but its answer stays on the device; waits for nothing.
    """

    hybrid: bool
    pack_draws: Callable[[SamplingRows], NDArray[np.float64]]
    draw: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    judge: Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, ...]]
