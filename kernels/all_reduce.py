"""All-reduce among the tensor-parallel ranks of one machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

# Size in bytes -> descriptor of a zeroed file that all ranks open; None where they share none.
ShareFile = Callable[[int], int | None]


class AllReduce(Protocol):
    """Sums through shared memory. Every rank makes the same calls in the same order."""

    def try_all_reduce(self, x: torch.Tensor) -> bool:
        """Replace x by the sum of all ranks' x, bit-identical on each; False where x cannot be
        summed this way (dtype, strides). Raises RuntimeError when a rank is gone."""
        ...

    def close(self) -> None:
        """Make ranks that wait for this one fail. Callable from any thread."""
        ...
