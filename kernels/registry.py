"""Which backend computes: chosen once by name, device and what this machine can load."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.interface import Backend
from kernels.torch_native import PlainBackend
from kernels.torch_sampling import Adjustment, Judged, SamplingRows, adjust, chosen_logprobs, sample

_Function = TypeVar("_Function", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class SamplingKernels:
    """The operations of `kernels.torch_sampling`: adjust logits in place, draw a token per row,
    judge tokens by the model's own distribution."""

    adjust: Callable[[torch.Tensor, Sequence[Adjustment]], None]
    sample: Callable[[torch.Tensor, SamplingRows], NDArray[np.int64]]
    chosen_logprobs: Callable[[torch.Tensor, torch.Tensor, int], Judged]


@dataclass(frozen=True, slots=True)
class CapturableDraw:
    """Sampling inside a CUDA graph: parameters packed on the host, tokens drawn on the GPU.

    pack: (S, 3) float64 for SamplingRows; draw: (logits_SV, packed_S3 on the device) -> tokens_S.
    """

    pack: Callable[[SamplingRows], NDArray[np.float64]]
    draw: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


_log = logging.getLogger(__name__)


class BackendError(RuntimeError):
    """A backend that was asked for by name cannot run here; the message says why."""


def _make(module: str, name: str) -> Callable[[torch.dtype], Backend]:
    def build(dtype: torch.dtype) -> Backend:
        backend: Backend = getattr(importlib.import_module(module), name)()
        return backend

    return build


# name -> (devices it runs on, constructor). Imports are lazy: most machines lack most of them.
_BACKENDS: dict[str, tuple[tuple[str, ...], Callable[[torch.dtype], Backend]]] = {
    "cpu": (("cpu",), _make("kernels.cpu.backend", "CpuBackend")),
    "torch": (("cpu", "cuda"), lambda dtype: PlainBackend()),
    "triton": (("cuda",), _make("kernels.triton.backend", "TritonBackend")),
    "flash_attn": (("cuda",), _make("kernels.flash.backend", "FlashBackend")),
}
_ON_GPU = {"adjust": "kernels.triton.logits:adjust", "sample": "kernels.triton.sampling:sample"}
_SAMPLING: dict[str, dict[str, str]] = {
    "cpu": {
        "adjust": "kernels.cpu.sampling:adjust",
        "sample": "kernels.cpu.sampling:sample",
        "chosen_logprobs": "kernels.cpu.sampling:chosen_logprobs",
    },
    "triton": _ON_GPU,
    "flash_attn": _ON_GPU,
}
_PREFERENCE = {"cpu": ("cpu", "torch"), "cuda": ("flash_attn", "triton", "torch")}


def resolve_backend(
    name: str, device: torch.device | str, dtype: torch.dtype, block_size: int | None = None
) -> Backend:
    """The backend called `name`, or the fastest that loads when it is "auto".

    block_size: of the KV cache, where it is known: not every backend pages as finely.
    Raises BackendError for an unknown name, a device it does not run on, or a library that does
    not load; "auto" falls through to plain torch and logs what it passed over.
    """
    kind = torch.device(device).type
    if name == "auto":
        for candidate in _PREFERENCE.get(kind, ("torch",)):
            try:
                backend = _load(candidate, kind, dtype, block_size)
            except BackendError as unavailable:
                _log.info("%s", unavailable)
            else:
                _log.info("backend %s computes on %s in %s", backend.name, kind, dtype)
                return backend
        raise BackendError(f"no backend computes on {kind}")
    backend = _load(name, kind, dtype, block_size)
    _log.info("backend %s computes on %s in %s, as asked", backend.name, kind, dtype)
    return backend


def resolve_sampling(backend: Backend) -> SamplingKernels:
    """The fastest sampling that goes with a backend; all of them draw the same tokens."""
    return SamplingKernels(
        _optional(backend, "adjust", adjust),
        _optional(backend, "sample", sample),
        _optional(backend, "chosen_logprobs", chosen_logprobs),
    )


def captures_hybrid_of(backend: Backend) -> bool | None:
    """Whether a backend's passes can be captured in CUDA graphs with chunks in them (True), only
    with decodes (False), or not at all (None)."""
    return getattr(backend, "captures_hybrid", None)


def resolve_draw() -> CapturableDraw:
    """The sampler that can be captured; raises ImportError without Triton."""
    sampling = importlib.import_module("kernels.triton.sampling")
    return CapturableDraw(sampling.pack_rows, sampling.sample_rows)


def _optional(backend: Backend, name: str, plain: _Function) -> _Function:
    """A backend's own function where it has one."""
    path = _SAMPLING.get(backend.name, {}).get(name)
    if path is None:
        return plain
    module, _, attribute = path.partition(":")
    try:
        function: _Function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as absent:
        _log.warning("backend %s has no %s of its own (%s)", backend.name, name, absent)
        return plain
    return function


def limit_threads(backend: Backend, num_threads: int) -> None:
    """Compute with this many threads of the CPU, the calling one included."""
    torch.set_num_threads(num_threads)
    if backend.name == "cpu":
        importlib.import_module("kernels.cpu.library").set_num_threads(num_threads)


def leave_cores_to(backend: Backend) -> None:
    """Once weights are loaded: no threads of torch's beside a backend that has its own.

    torch spreads any operation on 32768 numbers or more, such as looking up 57 embeddings of 576,
    over its threads, which then spin for milliseconds on the cores that the backend computes on.
    """
    if backend.name == "cpu":
        torch.set_num_threads(1)


def _load(name: str, kind: str, dtype: torch.dtype, block_size: int | None) -> Backend:
    known = _BACKENDS.get(name)
    if known is None:
        raise BackendError(f"backend {name!r} is unknown; known: auto, {', '.join(_BACKENDS)}")
    kinds, build = known
    if kind not in kinds and not (kinds == ("cuda",) and _triton_is_interpreted()):
        raise BackendError(f"backend {name!r} runs on {' or '.join(kinds)}, not on {kind}")
    if name == "flash_attn" and (missing := _why_no_flash(dtype, block_size)):
        raise BackendError(f"backend 'flash_attn' is not available: {missing}")
    try:
        return build(dtype)
    except (ImportError, OSError, RuntimeError) as bad:
        # A library that is absent, was built for another machine, or does not compile here.
        raise BackendError(f"backend {name!r} is not available: {bad}") from bad


def _triton_is_interpreted() -> bool:
    """Then GPU kernels run on CPU tensors: slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _why_no_flash(dtype: torch.dtype, block_size: int | None) -> str:
    if find_spec("flash_attn") is None:
        return "the flash_attn package is not installed"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, not {dtype}"
    if block_size is not None and block_size % 256:
        return f"it needs kv.block_size to be a multiple of 256, not {block_size}"
    return ""
