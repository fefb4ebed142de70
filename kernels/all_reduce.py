"""All-reduce among the tensor-parallel ranks of one machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

# Size in bytes -> descriptor of a zeroed file that all ranks open; None where they share none.
ShareFile = Callable[[int], int | None]

# Most rows of a PeerMemory. A program per row waits for other ranks', so all must run at once: one
# on each multiprocessor of an H100 (132), two on those of smaller GPUs.
PEER_ROWS = 128


class AllReduce(Protocol):
    """Sums through shared memory. Every rank makes the same calls in the same order."""

    def try_all_reduce(self, x: torch.Tensor) -> bool:
        """Replace x by the sum of all ranks' x, bit-identical on each; False where x cannot be
        summed this way (dtype, strides). Raises RuntimeError when a rank is gone."""
        ...

    def close(self) -> None:
        """Make ranks that wait for this one fail. Callable from any thread."""
        ...


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """Memory of each rank's device that kernels of all ranks read and write (P rows, R ranks).

    Every rank makes the same calls in the same order, one at a time. All numbers are int64 and 0 at
    first. windows_2PH: this rank's parts, of even and of odd calls. counts_P: additions by all
    ranks to this one's rows, one of each per call. calls_P: of each row; not shared. addresses_2R:
    of counts_P and of windows_2PH of each rank, the latter multiples of 16.
    """

    windows_2PH: torch.Tensor
    counts_P: torch.Tensor
    calls_P: torch.Tensor
    addresses_2R: torch.Tensor

    def holds(self, x_TH: torch.Tensor) -> bool:
        _, most, width = self.windows_2PH.shape
        fits = x_TH.dim() == 2 and x_TH.shape[1] == width and 0 < len(x_TH) <= most
        return fits and x_TH.dtype == self.windows_2PH.dtype and x_TH.is_contiguous()
