"""Sums over the ranks of a stage that share a machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

# Bytes -> a descriptor of a file of zeros that all ranks have open; None where they cannot.
ShareFile = Callable[[int], int | None]


class RankSums(Protocol):
    """Every rank makes the same calls in the same order."""

    def add(self, x: torch.Tensor) -> bool:
        """Make x the sum of all ranks' x, with the same bits on each; False where it cannot be
        summed this way. Raises RuntimeError when a rank has gone."""
        ...

    def close(self) -> None:
        """Ranks that wait for this one get an error. From any thread."""
        ...
