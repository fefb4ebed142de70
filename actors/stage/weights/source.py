"""The interface of weight sources: a slice of a named tensor in the stage's dtype."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kernels.quantized import QuantizedWeight


@dataclass(frozen=True, slots=True)
class Shard:
    """A half-open range of rows or columns of a two- or one-dimensional tensor; None: all."""

    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None


WHOLE = Shard()
CPU = torch.device("cpu")


class WeightSource(Protocol):
    """Reads tensors by their Hugging Face name."""

    def stores(self, name: str) -> bool:
        """Whether a tensor that a model may lack is there."""
        ...

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        part: Shard = WHOLE,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """The part of tensor `name`, whose full shape must be `shape`; contiguous, in the stage's
        dtype or the given one.

        Raises ModelError naming the file if the tensor is missing or of another shape.
        """
        ...


class PackedSource(Protocol):
    """Linear layers stored as integers, by name without an ending."""

    def __contains__(self, name: str) -> bool: ...

    def has_bias(self, name: str) -> bool:
        """Whether a bias is stored, even if the architecture has none."""
        ...

    def read(self, name: str, shape: tuple[int, ...], part: Shard) -> QuantizedWeight:
        """The part of a layer whose whole weight must be `shape` (out, in features).

        Raises ModelError naming the file if it does not fit, or the part would cut a group.
        """
        ...


@dataclass(frozen=True, slots=True)
class PackedView:
    """The packed layers of a source with other layers too; implements `PackedSource`."""

    is_packed: Callable[[str], bool]
    read_packed: Callable[[str, Shard], QuantizedWeight]

    def __contains__(self, name: str) -> bool:
        return self.is_packed(name)

    def has_bias(self, name: str) -> bool:
        return False

    def read(self, name: str, shape: tuple[int, ...], part: Shard) -> QuantizedWeight:
        return self.read_packed(name, part)


class DummySource:
    """Random weights drawn from a seed and the tensor's name alone.

    Every stage and rank draws the whole tensor and keeps its part, so the model does not depend on
    the split. Norm weights are ones; others are uniform with standard deviation 0.02, one random
    byte each, so that large models for measurements are drawn quickly. A GPU draws numbers of its
    own, in a tenth of the time.
    """

    # Bytes -128 .. 127, shifted by a half to be symmetric; the standard deviation of a uniform
    # distribution is its half width / sqrt(3).
    _STEP = 0.02 * 3**0.5 / 128

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device = CPU) -> None:
        self._seed = seed
        self._dtype = dtype
        self._device = device

    def stores(self, name: str) -> bool:
        return False

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        part: Shard = WHOLE,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        dtype = dtype or self._dtype
        if len(shape) == 1 and name.endswith(".weight"):
            full = torch.ones(shape, dtype=dtype, device=self._device)
        else:
            codes = cut(self._draw(name, shape), part)
            return codes.to(dtype).add_(0.5).mul_(self._STEP)
        return cut(full, part)

    def _draw(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little")
        if self._device.type == "cuda":
            generator = torch.Generator(self._device).manual_seed(seed >> 1)  # it takes 63 bits
            return torch.randint(
                -128, 128, shape, dtype=torch.int8, device=self._device, generator=generator
            )
        stream = np.random.Generator(np.random.SFC64(seed))
        drawn = np.frombuffer(stream.bytes(math.prod(shape)), dtype=np.int8).reshape(shape)
        return torch.from_numpy(drawn.copy())


def cut(full: torch.Tensor, part: Shard) -> torch.Tensor:
    """The part of a tensor in memory, as a tensor of its own."""
    if part.rows is not None:
        full = full[part.rows[0] : part.rows[1]]
    if part.columns is not None:
        full = full[..., part.columns[0] : part.columns[1]]
    return full.clone() if part != WHOLE else full
