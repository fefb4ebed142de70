"""Backend "flash_attn": attention by FlashAttention-3, or by flash-attn 2.8 over pages of 256; the
rest as backend "triton"."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType

import torch

from kernels.device_time import graph_time_s
from kernels.flash import library
from kernels.flash.flash3 import Flash3Attention
from kernels.flash.hybrid import SeqLens, measure_crossover, one_call, split_kv, two_calls
from kernels.flash.library import Flash3Library, FlashLibrary
from kernels.interface import AttentionShape, Batch, KVLayer
from kernels.triton.backend import TritonBackend, paged
from kernels.triton.tiles import num_programs

_log = logging.getLogger(__name__)


class FlashBackend(TritonBackend):
    """Attention by `library.load`. Raises ImportError at construction where nothing is installed.

    one_call_up_to: of flash-attn 2.8, hybrid batches whose longest context is at most this take one
    call, others two; None: measured when the cache is allocated on a GPU.
    """

    name = "flash_attn"
    kv_dtypes: Mapping[str, torch.dtype] = MappingProxyType({})

    def __init__(
        self,
        flash: FlashLibrary | Flash3Library | None = None,
        one_call_up_to: int | None = None,
    ) -> None:
        # Triton's attention is the exception here: whether one launch is faster is not measured.
        super().__init__(one_launch=False)
        flash = library.load() if flash is None else flash
        self._page_multiple = flash.page_multiple
        self._flash: FlashLibrary | Flash3Attention = (
            Flash3Attention(flash) if isinstance(flash, Flash3Library) else flash
        )
        # A varlen launch of 2.8 has programs for the longest chunk a capture allows, for every
        # slice and head: most would be empty. Its hybrid batches therefore run uncaptured.
        self.captures_hybrid = isinstance(flash, Flash3Library)
        self.one_call_up_to = one_call_up_to
        self._lengths: tuple[Batch, SeqLens] | None = None

    def unsupported(
        self, dtype: torch.dtype, block_size: int | None = None, head_dim: int | None = None
    ) -> str | None:
        if problem := super().unsupported(dtype, block_size, head_dim):
            return problem
        if dtype not in library.DTYPES:
            return f"it computes in bfloat16 or float16, not {dtype}"
        if block_size is not None and block_size % self._page_multiple:
            return (
                f"it needs kv.block_size to be a multiple of {self._page_multiple}, "
                f"not {block_size}"
            )
        return None if head_dim is None else library.unsupported_head_dim(head_dim)

    def allocate_kv(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        shape: AttentionShape,
        dtype: torch.dtype,
        device: torch.device,
    ) -> list[KVLayer]:
        """Raises ValueError for a cache flash-attn cannot read."""
        if problem := library.unsupported(shape.head_dim, dtype, block_size, self._page_multiple):
            raise ValueError(problem)
        if self.one_call_up_to is None and isinstance(self._flash, FlashLibrary):
            self.one_call_up_to = 0
            if device.type == "cuda":
                self.one_call_up_to = measure_crossover(
                    self._flash, shape, dtype, device, graph_time_s
                )
            _log.info("flash-attn: one call up to %d tokens of context", self.one_call_up_to)
        return super().allocate_kv(num_layers, num_blocks, block_size, shape, dtype, device)

    def attention(
        self, q_TND: torch.Tensor, batch: Batch, layer: KVLayer, shape: AttentionShape
    ) -> torch.Tensor:
        # Neither library has sinks; chunks are not asked of them; ALiBi slopes, of 2.8 only, cannot
        # express rounded biases (Falcon's).
        foreign = shape.sinks_N is not None or shape.alibi_NP is not None or shape.chunked
        if foreign:
            return super().attention(q_TND, batch, layer, shape)
        if isinstance(self._flash, Flash3Attention):
            return self._flash(q_TND, batch, paged(layer), shape).flatten(1)
        if _splits_by_width(batch, shape):
            return super().attention(q_TND, batch, layer, shape)
        arguments = (self._flash, q_TND, batch, self._lengths_of(batch), paged(layer), shape)
        if batch.max_length == 1:
            out_TND = split_kv(*arguments)
        elif batch.num_decodes == 0 or batch.max_kv_length <= (self.one_call_up_to or 0):
            out_TND = one_call(*arguments)
        else:
            out_TND = two_calls(*arguments)
        return out_TND.flatten(1)

    def _lengths_of(self, batch: Batch) -> SeqLens:
        """Computed once per batch, not per layer. A batch to be captured must be a new object, so
        that its lengths are computed inside the graph."""
        if self._lengths is None or self._lengths[0] is not batch:
            self._lengths = (batch, SeqLens.of(batch))
        return self._lengths[1]


def _splits_by_width(batch: Batch, shape: AttentionShape) -> bool:
    """Whether flash-attn would cut the KV of captured decodes into parts of their tables' width,
    which is that of the longest context there may be: at short ones most parts are empty. Batches
    that fill the GPU are not cut."""
    return batch.captured and len(batch.starts_S) * shape.num_kv_heads < num_programs()
