"""Operations that wait for the device, refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Waited(Exception):
    """A step waited for the device, or made a tensor whose size depends on data."""


_WAITS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.bincount.default,
}
_INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default}
_WAITING_METHODS = {torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy}


class _RefusedOperations(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        indices = args[1] if function in _INDEXING else ()
        by_mask = any(index is not None and index.dtype == torch.bool for index in indices)
        if function in _WAITS or by_mask:
            raise Waited(str(function))
        return function(*args, **(kwargs or {}))


class _RefusedMethods(TorchFunctionMode):
    """Those that torch implements without an operation."""

    def __init__(self, on_host: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self._on_host = on_host

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _WAITING_METHODS and all(args[0] is not t for t in self._on_host):
            raise Waited(str(function))
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def refusing_waits(*on_host: torch.Tensor) -> Iterator[None]:
    """Raise Waited; but tensors that are on the host by themselves may be viewed as arrays."""
    with _RefusedMethods(on_host), _RefusedOperations():
        yield
