"""The two functions that are used of flash-attn (2.8), as one small type that tests can fake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

# Documented limits of the paged path (flash-attn 2.8.3).
PAGE_MULTIPLE = 256
LARGEST_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8
DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class FlashLibrary:
    """flash_attn_varlen_func and flash_attn_with_kvcache."""

    varlen: Callable[..., torch.Tensor]
    with_kvcache: Callable[..., torch.Tensor]


def load() -> FlashLibrary:
    """The installed flash-attn. Raises ImportError where it is missing or was built for another
    torch."""
    import flash_attn

    return FlashLibrary(flash_attn.flash_attn_varlen_func, flash_attn.flash_attn_with_kvcache)


def unsupported(head_dim: int, dtype: torch.dtype, block_size: int) -> str | None:
    """Why flash-attn cannot serve this cache, or None."""
    if dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        return f"flash-attn reads caches of float16 or bfloat16, not {name}"
    if block_size % PAGE_MULTIPLE:
        return (
            f"flash-attn needs kv.block_size to be a multiple of {PAGE_MULTIPLE}, not {block_size}"
        )
    if head_dim > LARGEST_HEAD_DIM or head_dim % HEAD_DIM_MULTIPLE:
        return (
            f"flash-attn needs a head dimension of at most {LARGEST_HEAD_DIM} that is a multiple "
            f"of {HEAD_DIM_MULTIPLE}, not {head_dim}"
        )
    return None
