"""Backend selection: once, by name, device and what this machine can load."""

from __future__ import annotations

import importlib
import logging
import os
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from kernels.interface import Backend

_log = logging.getLogger(__name__)


class BackendError(ValueError):
    """The requested backend cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """One backend. path: "module:Class", imported on selection, since most machines lack most of
    them; the class takes no arguments. devices: torch device types it computes on."""

    path: str
    devices: tuple[str, ...]
    packages: tuple[str, ...] = ()  # that must be installed


# By name; "auto" takes the first that runs on the device. Triton's attention comes before
# flash-attn's: on an H100 it takes four fifths of flash-attn 2.8's time for hybrid batches;
# FlashAttention-3 has not been measured.
BACKENDS: dict[str, BackendEntry] = {
    "cpu": BackendEntry("kernels.cpu.backend:CpuBackend", ("cpu",)),
    "triton": BackendEntry("kernels.triton.backend:TritonBackend", ("cuda",), ("triton",)),
    "flash_attn": BackendEntry("kernels.flash.backend:FlashBackend", ("cuda",), ("triton",)),
    "torch": BackendEntry("kernels.torch.backend:TorchBackend", ("cpu", "cuda")),
}


def resolve_backend(
    name: str,
    device: torch.device | str,
    dtype: torch.dtype,
    block_size: int | None = None,
    kv_dtype: str | None = None,
    head_dim: int | None = None,
) -> Backend:
    """The backend called `name`, or the first of `BACKENDS` that runs here when it is "auto".

    block_size, head_dim: of the KV cache, where they are known: not every backend pages as finely
    or has kernels for every size of heads.
    kv_dtype: one of the `kv_dtypes` of some backends, which "auto" must find; None is any.
    Raises BackendError for an unknown name, a device it does not run on, or a library that does
    not load; "auto" logs what it passed over.
    """
    kind = torch.device(device).type
    if name != "auto":
        backend = _load(name, kind, dtype, block_size, head_dim)
        _log.info("backend %s computes on %s in %s, as asked", backend.name, kind, dtype)
        return backend
    for candidate, entry in BACKENDS.items():
        if kind not in entry.devices:
            continue
        try:
            backend = _load(candidate, kind, dtype, block_size, head_dim)
        except BackendError as unavailable:
            _log.info("%s", unavailable)
            continue
        if kv_dtype is not None and kv_dtype not in backend.kv_dtypes:
            _log.info("backend %r has no KV cache of dtype %r", candidate, kv_dtype)
        else:
            _log.info("backend %s computes on %s in %s", backend.name, kind, dtype)
            return backend
    wanted = "" if kv_dtype is None else f" with a KV cache of dtype {kv_dtype!r}"
    raise BackendError(f"no backend computes on {kind}{wanted}")


def _load(
    name: str, kind: str, dtype: torch.dtype, block_size: int | None, head_dim: int | None
) -> Backend:
    entry = BACKENDS.get(name)
    if entry is None:
        raise BackendError(f"backend {name!r} is unknown; known: auto, {', '.join(BACKENDS)}")
    if kind not in entry.devices and not ("triton" in entry.packages and _triton_is_interpreted()):
        raise BackendError(f"backend {name!r} runs on {' or '.join(entry.devices)}, not on {kind}")
    problem = _missing(entry.packages)
    if problem is None:
        module, _, attribute = entry.path.partition(":")
        try:
            backend: Backend = getattr(importlib.import_module(module), attribute)()
        except (ImportError, OSError, RuntimeError) as bad:
            # A library that is absent, was built for another machine, or does not compile here.
            raise BackendError(f"backend {name!r} is not available: {bad}") from bad
        problem = backend.unsupported(dtype, block_size, head_dim)
        if problem is None:
            return backend
    raise BackendError(f"backend {name!r} is not available: {problem}")


def _missing(packages: tuple[str, ...]) -> str | None:
    for package in packages:
        if find_spec(package) is None:
            return f"the {package} package is not installed"
    return None


def _triton_is_interpreted() -> bool:
    """Whether GPU kernels run on CPU tensors: slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"
