"""What is used of flash-attn 2.8 and of FlashAttention-3, as small types that tests can fake."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

import torch

_log = logging.getLogger(__name__)

# Documented limits of both libraries.
LARGEST_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8
DTYPES = (torch.float16, torch.bfloat16)
# Of the paged path of flash-attn 2.8.3.
PAGE_MULTIPLE = 256

HOPPER = (9, 0)  # the compute capability whose kernels FlashAttention-3 is taken for


@dataclass(frozen=True, slots=True)
class FlashLibrary:
    """flash-attn 2.8: flash_attn_varlen_func and flash_attn_with_kvcache."""

    page_multiple: ClassVar[int] = PAGE_MULTIPLE

    varlen: Callable[..., torch.Tensor]
    with_kvcache: Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Flash3Library:
    """FlashAttention-3: its flash_attn_with_kvcache, which takes slices of any lengths, and
    get_scheduler_metadata."""

    page_multiple: ClassVar[int] = 1

    with_kvcache: Callable[..., torch.Tensor]
    schedule: Callable[..., torch.Tensor]


def load() -> FlashLibrary | Flash3Library:
    """FlashAttention-3 where it is installed and the GPU is a Hopper, else flash-attn.

    Raises ImportError where neither is installed, or flash-attn was built for another torch."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == HOPPER:
        try:
            from flash_attn_interface import flash_attn_with_kvcache, get_scheduler_metadata
        except (ImportError, OSError) as unusable:  # absent, or built for another torch
            _log.info("flash_attn does not use FlashAttention-3: %s", unusable)
        else:
            _log.info("flash_attn uses FlashAttention-3")
            return Flash3Library(flash_attn_with_kvcache, get_scheduler_metadata)
    if find_spec("flash_attn") is None:
        raise ImportError(
            "the flash_attn package is not installed, and flash_attn_interface (FlashAttention-3) "
            "is not usable here"
        )
    # By name: FlashAttention-4 is a package `flash_attn` as well, which has other functions.
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    return FlashLibrary(flash_attn_varlen_func, flash_attn_with_kvcache)


def unsupported(
    head_dim: int, dtype: torch.dtype, block_size: int, page_multiple: int
) -> str | None:
    """Why the library cannot serve this cache, or None."""
    if dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        return f"flash-attn reads caches of float16 or bfloat16, not {name}"
    if block_size % page_multiple:
        return (
            f"flash-attn needs kv.block_size to be a multiple of {page_multiple}, not {block_size}"
        )
    return unsupported_head_dim(head_dim)


def unsupported_head_dim(head_dim: int) -> str | None:
    """Why the library has no kernel for heads of this size, or None."""
    if head_dim > LARGEST_HEAD_DIM or head_dim % HEAD_DIM_MULTIPLE:
        return (
            f"flash-attn needs a head dimension of at most {LARGEST_HEAD_DIM} that is a multiple "
            f"of {HEAD_DIM_MULTIPLE}, not {head_dim}"
        )
    return None
