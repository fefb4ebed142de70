"""The tensor work of one pipeline stage, one small method per operation.

Every backend (C++ on CPU, plain torch, Triton, flash-attn) implements `Backend`; a float64-checked
reference stands beside each fast version. The choice is made once, explicitly, and logged.

Shape suffixes: T tokens of the whole hybrid batch (all requests flattened), S slices (one per
request in the batch), B KV blocks per table row, H hidden, N query heads, G key/value heads,
D head dimension, I MLP inner size, V vocabulary, K/O input/output features of a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(slots=True)
class Batch:
    """Geometry of one hybrid batch. Slices lie one after another along T, decodes first.

    starts_S and lengths_S are the `start` and `num_tokens` of the plan's slices, so slice s
    attends to kv positions [0, starts + lengths) causally, through its block_tables row.
    All integer tensors are int32 and contiguous, on the stage's device.
    """

    positions_T: torch.Tensor
    query_starts_S1: torch.Tensor  # S + 1 offsets into T
    starts_S: torch.Tensor
    lengths_S: torch.Tensor
    block_tables_SB: torch.Tensor  # rows padded with 0 behind the blocks in use
    slot_mapping_T: torch.Tensor  # block id * block_size + offset, where token t's K/V goes
    num_decodes: int  # leading slices of one token
    max_length: int  # longest slice
    max_kv_length: int  # longest starts + lengths
    # A CUDA graph is being captured over this batch: tensors will be rewritten between replays,
    # so the integers above are upper bounds, any slice may hold one token, several or none
    # (padding, at the end), and padding tokens have slot -1.
    captured: bool = False


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What attention and the KV cache need to know of a model (per rank: heads are local)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None  # a token sees itself and window - 1 before it
    softcap: float | None = None


class Linear(Protocol):
    """A weight packed once for this backend."""

    in_features: int
    out_features: int

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:  # -> x_TO
        ...


class KVLayer(Protocol):
    """One layer's paged cache; its inner layout belongs to the backend."""


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer, packed. q/k norms (Qwen3) and biases may be absent."""

    input_norm_H: torch.Tensor
    qkv: Linear  # out: (N + 2 G) * D, rows ordered q, k, v
    out: Linear
    post_norm_H: torch.Tensor
    gate_up: Linear  # out: 2 I, rows ordered gate, up
    down: Linear
    q_norm_D: torch.Tensor | None = None
    k_norm_D: torch.Tensor | None = None
    sliding_window: int | None = None


class Backend(Protocol):
    """Tensors are contiguous and of the model dtype unless said otherwise."""

    name: str

    def pack_linear(
        self, weight_OK: torch.Tensor, bias_O: torch.Tensor | None, quantization: str = "none"
    ) -> Linear:
        """Take ownership of a weight; quantization: "none", "int8" or "int4"."""
        ...

    def rms_norm(self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor: ...

    def add_rms_norm(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """residual += x in place; returns the norm of the new residual."""
        ...

    def silu_mul(self, gate_up_T2I: torch.Tensor) -> torch.Tensor: ...

    def allocate_kv(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        shape: AttentionShape,
        dtype: torch.dtype,
        device: torch.device,
    ) -> list[KVLayer]: ...

    def kv_block_bytes(self, block_size: int, shape: AttentionShape, dtype: torch.dtype) -> int:
        """Bytes of one block of one layer."""
        ...

    def copy_blocks(self, layers: Sequence[KVLayer], pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block `source` to `destination` in every layer (copy-on-write)."""
        ...

    def read_block(self, layer: KVLayer, block: int) -> torch.Tensor:
        """A host copy of one block (for swapping), opaque to the caller."""
        ...

    def write_block(self, layer: KVLayer, block: int, data: torch.Tensor) -> None: ...

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
        """Norm q and k if asked, rotate them, store k and v in the cache; returns q_TND.

        cos_sin_PD: float32 table by position, cos in the first half of D, sin in the second;
        rotation pairs feature i with i + D/2 (the Hugging Face layout).
        """
        ...

    def attention(
        self, q_TND: torch.Tensor, batch: Batch, layer: KVLayer, shape: AttentionShape
    ) -> torch.Tensor:
        """Causal paged attention of the whole hybrid batch -> (T, N * D)."""
        ...

    def decoder_stack(
        self,
        layers: Sequence[LayerWeights],
        kv: Sequence[KVLayer],
        cos_sin_PD: torch.Tensor,
        shape: AttentionShape,
        eps: float,
    ) -> (
        Callable[[torch.Tensor, torch.Tensor | None, Batch], tuple[torch.Tensor, torch.Tensor]]
        | None
    ):
        """All layers in one call, (x_TH, residual_TH | None, batch) -> (x_TH, residual_TH).

        None where the backend has no fused form; the model then calls operation by operation.
        `residual` None means x is the embedding itself. The final norm is the caller's.
        """
        ...
