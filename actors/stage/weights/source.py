"""Where tensors come from, one small interface: a slice of a named tensor, in the stage's dtype."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Part:
    """A half-open range of rows or columns of a two- or one-dimensional tensor; None: all."""

    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None


WHOLE = Part()


class WeightSource(Protocol):
    """Reads tensors by their Hugging Face name."""

    def read(self, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> torch.Tensor:
        """The part of tensor `name`, whose full shape must be `shape`; contiguous.

        Raises ModelError naming the file where the tensor is missing or of another shape.
        """
        ...


class DummySource:
    """Random weights drawn from a seed and the tensor's name alone.

    Every stage and rank draws the whole tensor and keeps its part, so the model is the same
    however it is split. Norm weights are ones; the rest is uniform with deviation 0.02.
    """

    _HALF_WIDTH = 0.02 * 3**0.5  # a uniform distribution's deviation is its half width / sqrt(3)

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._seed = seed
        self._dtype = dtype

    def read(self, name: str, shape: tuple[int, ...], part: Part = WHOLE) -> torch.Tensor:
        if name.endswith("norm.weight"):
            full = torch.ones(shape, dtype=self._dtype)
        else:
            digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            full = torch.empty(shape, dtype=self._dtype)
            full.uniform_(-self._HALF_WIDTH, self._HALF_WIDTH, generator=generator)
        return cut(full, part)


def cut(full: torch.Tensor, part: Part) -> torch.Tensor:
    """The part of a tensor in memory, as a tensor of its own."""
    if part.rows is not None:
        full = full[part.rows[0] : part.rows[1]]
    if part.columns is not None:
        full = full[..., part.columns[0] : part.columns[1]]
    return full.clone() if part != WHOLE else full
