"""The paged KV cache of one layer, in flash-attn's layout.

Both GPU backends share it: (blocks, block_size, kv heads, head dim) for K and for V, in the
model's dtype, or e4m3 codes in uint8 with one scale per tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.interface import AttentionShape

FLOAT8 = torch.float8_e4m3fn


@dataclass(slots=True)
class PagedKV:
    """K and V of one layer, (blocks, block_size, kv heads, head dim) each.

    A cached value is the stored number times k_scale or v_scale.
    """

    keys: torch.Tensor
    values: torch.Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def is_float8(self) -> bool:
        return self.keys.dtype == torch.uint8

    @property
    def block_size(self) -> int:
        return self.keys.shape[1]


def storage_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.uint8 if dtype == FLOAT8 else dtype


def allocate(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
) -> list[PagedKV]:
    """Zeroed caches; one allocation per layer, so that no tensor needs 64-bit strides."""
    size = (2, num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
    layers = []
    for _ in range(num_layers):
        both = torch.zeros(size, dtype=storage_dtype(dtype), device=device)
        layers.append(PagedKV(both[0], both[1]))
    return layers


def block_bytes(block_size: int, shape: AttentionShape, dtype: torch.dtype) -> int:
    return 2 * block_size * shape.num_kv_heads * shape.head_dim * storage_dtype(dtype).itemsize


def read_block(layer: PagedKV, block: int) -> torch.Tensor:
    return torch.stack((layer.keys[block], layer.values[block])).cpu()
