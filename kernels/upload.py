"""Transfers to and from a device that wait for no step: of host arrays, and on a stream apart."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

# Parts of a packed transfer begin at multiples of this many int32: 64 bytes.
_ALIGNMENT = 16


class SideStream:
    """For work beside the steps of a GPU: on their stream, each copy would wait for one."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """A block whose work is complete at its end; on a CPU any block is."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


def upload(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """The values on the device; on CPU the array itself. To a GPU through pinned memory: a copy
    from pageable memory would synchronize with the stream."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def upload_all(arrays: Sequence[NDArray[np.int32]], device: torch.device) -> list[torch.Tensor]:
    """The arrays on a GPU, by one transfer."""
    offsets = np.cumsum([0, *(-(-a.size // _ALIGNMENT) * _ALIGNMENT for a in arrays)])
    host = torch.empty(int(offsets[-1]), dtype=torch.int32, pin_memory=True)
    flat = host.numpy()
    for array, offset in zip(arrays, offsets, strict=False):
        flat[offset : offset + array.size] = array.ravel()
    on_device = host.to(device, non_blocking=True)
    return [
        on_device[offset : offset + array.size].view(array.shape)
        for array, offset in zip(arrays, offsets, strict=False)
    ]
