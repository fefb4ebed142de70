"""Backend "triton": kernels of our own for everything but dense matrix products (cuBLAS)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kernels.interface import AttentionShape, Batch, KVLayer, LayerWeights, Linear
from kernels.triton import cache
from kernels.triton.activation import silu_mul
from kernels.triton.attention import attention
from kernels.triton.cache import PagedKV
from kernels.triton.linear import DenseLinear, QuantizedLinear
from kernels.triton.norm import rms_norm
from kernels.triton.packing import pack_weight
from kernels.triton.rope import rope_and_cache

DecoderStack = Callable[
    [torch.Tensor, torch.Tensor | None, Batch], tuple[torch.Tensor, torch.Tensor]
]


class TritonBackend:
    """Any page size, any grouping, head dims to 256, sliding window, softcap, float8 KV."""

    name = "triton"
    # Whether attention may be captured with chunks in it (see Batch.captured).
    captures_hybrid = True

    def pack_linear(
        self, weight_OK: torch.Tensor, bias_O: torch.Tensor | None, quantization: str = "none"
    ) -> Linear:
        if quantization == "none":
            return DenseLinear(weight_OK, bias_O)
        return QuantizedLinear(pack_weight(weight_OK, quantization), bias_O)

    def rms_norm(self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x_TH, weight_H, eps)

    def add_rms_norm(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return rms_norm(x_TH, weight_H, eps, residual_TH)

    def silu_mul(self, gate_up_T2I: torch.Tensor) -> torch.Tensor:
        return silu_mul(gate_up_T2I)

    def allocate_kv(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        shape: AttentionShape,
        dtype: torch.dtype,
        device: torch.device,
    ) -> list[KVLayer]:
        return [*cache.allocate(num_layers, num_blocks, block_size, shape, dtype, device)]

    def kv_block_bytes(self, block_size: int, shape: AttentionShape, dtype: torch.dtype) -> int:
        return cache.block_bytes(block_size, shape, dtype)

    def copy_blocks(self, layers: Sequence[KVLayer], pairs: Sequence[tuple[int, int]]) -> None:
        cache.copy_blocks([paged(layer) for layer in layers], pairs)

    def read_block(self, layer: KVLayer, block: int) -> torch.Tensor:
        return cache.read_block(paged(layer), block)

    def write_block(self, layer: KVLayer, block: int, data: torch.Tensor) -> None:
        cache.write_block(paged(layer), block, data)

    def rope_and_cache(
        self,
        qkv_TX: torch.Tensor,
        cos_sin_PD: torch.Tensor,
        batch: Batch,
        layer: KVLayer,
        shape: AttentionShape,
        q_norm_D: torch.Tensor | None = None,
        k_norm_D: torch.Tensor | None = None,
        eps: float = 1e-6,
    ) -> torch.Tensor:
        return rope_and_cache(
            qkv_TX, cos_sin_PD, batch, paged(layer), shape, q_norm_D, k_norm_D, eps
        )

    def attention(
        self, q_TND: torch.Tensor, batch: Batch, layer: KVLayer, shape: AttentionShape
    ) -> torch.Tensor:
        return attention(q_TND, batch, paged(layer), shape)

    def decoder_stack(
        self,
        layers: Sequence[LayerWeights],
        kv: Sequence[KVLayer],
        cos_sin_PD: torch.Tensor,
        shape: AttentionShape,
        eps: float,
    ) -> DecoderStack | None:
        return None  # operation by operation: on a GPU it is CUDA graphs that fuse the launches


def paged(layer: KVLayer) -> PagedKV:
    if not isinstance(layer, PagedKV):
        raise TypeError(f"a GPU backend was given a cache of {type(layer).__name__}")
    return layer
