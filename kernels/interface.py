"""The tensor operations of one pipeline stage, one small method each.

`Backend` is the whole contract: nothing outside `kernels` asks which backend it holds.
`TorchBackend` (kernels/torch) implements all of it; the others (C++ on CPU, Triton, flash-attn)
inherit from it and override what they accelerate. `kernels.registry` selects one and logs it.

Shape suffixes: T tokens of the whole hybrid batch (all requests flattened), S slices (one per
request in the batch) and, in sampling, rows that draw a token, B KV blocks per row of a block
table, H hidden, N query heads, G key/value heads, D head dimension, I MLP inner size, V vocabulary,
R any rows of logits, P positions of the rotation table, K/O input/output features of a linear
layer, X of several side by side (q, k and v, or gate and up).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.adapters import AdapterModule, AdapterRuns
from kernels.all_reduce import AllReduce, PeerMemory, ShareFile
from kernels.graph_support import GraphSupport
from kernels.layer_form import LayerForm
from kernels.layer_weights import Experts, HeadLinears, LayerWeights, Linear
from kernels.quantized import QuantizedWeight
from kernels.recurrence import Recurrent, StateRows
from kernels.sampling import Adjustment, ChosenLogprobs, SamplingRows


@dataclass(slots=True)
class Batch:
    """Attention metadata of one hybrid batch. Slices are contiguous along T, decodes first.

    starts_S and lengths_S are the `start` and `num_tokens` of the plan's slices (context and query
    lengths), so slice s attends causally to kv positions [0, starts + lengths), through its
    block_tables row. Integer tensors are int32 and contiguous, on the stage's device.
    """

    positions_T: torch.Tensor
    query_starts_S1: torch.Tensor  # cumulative query lengths from 0 (cu_seqlens_q)
    starts_S: torch.Tensor
    lengths_S: torch.Tensor
    block_tables_SB: torch.Tensor  # rows padded with 0 after the blocks in use
    slot_mapping_T: torch.Tensor  # block id * block_size + offset of token t's K and V
    num_decodes: int  # leading slices of one token
    max_length: int  # longest slice
    max_kv_length: int  # longest context with its chunk
    # A CUDA graph is captured over this batch: the tensors are rewritten between replays, so the
    # integers above are upper bounds, any slice may hold one token, several or none (padding, at
    # the end), and the slot of a padding token is -1.
    captured: bool = False
    adapters: AdapterRuns | None = None  # rows with a LoRA adapter; None in a captured batch
    states: StateRows | None = None  # for layers with a state


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Dimensions of a model's attention and KV cache; head counts are those of one rank.

    sinks_N: float32 attention sinks, one additional score per head in the softmax, without a value.
    alibi_NP: float32 ALiBi biases of key positions, which cover all positions of a batch; a query
    of head n at i adds alibi_NP[n, j] - alibi_NP[n, i] to its scaled, capped score of the key at j.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None  # a token sees itself and window - 1 before it
    softcap: float | None = None
    chunked: bool = False  # instead, a token sees those from the last multiple of the window on
    norms_last: bool = False  # norms of q and k come after the rotation
    sinks_N: torch.Tensor | None = field(default=None, compare=False)
    alibi_NP: torch.Tensor | None = field(default=None, compare=False)

    @property
    def window_code(self) -> int:
        """As kernels take it: 0 for no window, negative for a chunked one."""
        window = self.sliding_window or 0
        return -window if self.chunked else window


class KVLayer(Protocol):
    """One layer's paged KV cache; its memory layout is the backend's."""


# (x_TH, residual_TH | None, batch) -> (x_TH, residual_TH)
DecoderStack = Callable[
    [torch.Tensor, torch.Tensor | None, Batch], tuple[torch.Tensor, torch.Tensor]
]


class Backend(Recurrent, Protocol):
    """Tensors are contiguous and of the model dtype unless stated otherwise.

    The operations on the KV cache (`allocate_kv` to `decoder_stack`) share its layout: a backend
    with a layout of its own overrides all of them.
    """

    name: str  # in settings and logs
    kv_dtypes: Mapping[str, torch.dtype]  # KV caches narrower than the model, by setting
    quantizations: tuple[str, ...]  # of weights at load, beside "none"

    # ---- the machine -----------------------------------------------------------------------

    def unsupported(
        self, dtype: torch.dtype, block_size: int | None = None, head_dim: int | None = None
    ) -> str | None:
        """Why the backend cannot compute in `dtype`, or cache heads of `head_dim` in blocks of
        `block_size` tokens (None: not known yet); None where it can."""
        ...

    def unsupported_quantization(self, quantization: str) -> str | None:
        """Why one of `quantizations` cannot be computed on this machine; None where it can."""
        ...

    def instruction_set(self, device: torch.device) -> str:
        """Name of the instruction set used on the device; another may round differently."""
        ...

    def set_num_threads(self, num_threads: int) -> None:
        """Compute with this many threads of the CPU, the calling one included."""
        ...

    def finish_loading(self) -> None:
        """Called once all weights are packed, before the first step."""
        ...

    # ---- linear layers ---------------------------------------------------------------------

    def pack_linear(
        self, weight_OK: torch.Tensor, bias_O: torch.Tensor | None, quantization: str = "none"
    ) -> Linear:
        """Pack a weight; the caller gives it up. quantization: "none" or one of
        `quantizations`. Raises ValueError for another."""
        ...

    def pack_quantized(
        self,
        weights: Sequence[QuantizedWeight],
        bias_O: torch.Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Linear:
        """Fuse layers of the same input along the output, kept in integers where backend and
        formats allow, else dequantized to `dtype`, that of the activations."""
        ...

    def pack_heads(self, weight_NOK: torch.Tensor) -> HeadLinears: ...

    def add_adapters(
        self, module: AdapterModule, x_TK: torch.Tensor, y_TO: torch.Tensor, runs: AdapterRuns
    ) -> None:
        """LoRA: y_TO += B A x in place for the rows of all runs."""
        ...

    def prepare_adapters(self, module: AdapterModule) -> None:
        """Compile what `add_adapters` needs for this layer, whose slots may be empty."""
        ...

    # ---- between the linear layers ---------------------------------------------------------

    def rms_norm(self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor: ...

    def add_rms_norm(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """residual_TH += x_TH in place; returns the RMS norm of the sum."""
        ...

    def reduce_add_rms_norm(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float,
        peers: PeerMemory,
    ) -> torch.Tensor | None:  # fmt: skip
        """`add_rms_norm` of the sum of all ranks' x_TH, rounded to its dtype; None, and nothing
        done, where this is not one operation, consistently on all ranks."""
        ...

    def layer_norm(
        self, x_TH: torch.Tensor, weight_H: torch.Tensor, bias_H: torch.Tensor | None, eps: float
    ) -> torch.Tensor: ...

    def activate(self, x_TX: torch.Tensor, activation: str, gated: bool) -> torch.Tensor:
        """Apply one of `layer_form.ACTIVATIONS` -> (T, I); gated: to the first half of x, which is
        then multiplied by the second (x is (T, 2 I), gate first)."""
        ...

    def moe(self, x_TH: torch.Tensor, experts: Experts, form: LayerForm) -> torch.Tensor:
        """Mixture-of-experts MLP: route, apply the experts, sum their outputs by routing weight
        -> (T, H). Batch-invariant."""
        ...

    # ---- KV cache and attention ------------------------------------------------------------

    def measure_attention(
        self, shapes: Sequence[AttentionShape], kv_dtype: torch.dtype, block_size: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        """Time the ways that attention of these layers can take, before the cache has the memory.
        Without a measurement, the usual way is taken."""
        ...

    def allocate_kv(
        self, num_layers: int, num_blocks: int, block_size: int, shape: AttentionShape,
        dtype: torch.dtype, device: torch.device,
    ) -> list[KVLayer]:  # fmt: skip
        """Zeroed caches, one per layer. dtype: the model's or one of `kv_dtypes`. Raises ValueError
        for a shape without a kernel."""
        ...

    def wait_for_memory(self, layers: Sequence[KVLayer], limit_s: float) -> None:
        """Return once memory backs these caches, or after limit_s: before, steps may be slower."""
        ...

    def kv_block_bytes(self, block_size: int, shape: AttentionShape, dtype: torch.dtype) -> int:
        """Bytes of one block of one layer, K and V. Raises ValueError as `allocate_kv` does."""
        ...

    def copy_blocks(self, layers: Sequence[KVLayer], pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block `source` to `destination` in every layer (copy-on-write)."""
        ...

    def read_block(self, layer: KVLayer, block: int) -> torch.Tensor:
        """One block on the host: its shape and type are those of every place in `read_blocks`."""
        ...

    def read_blocks(
        self, layers: Sequence[KVLayer], numbers: Sequence[int], places: Sequence[torch.Tensor]
    ) -> None:
        """`read_block` of all layers, each block into its place on the host, (layers, ...). A GPU
        fills pinned places when its stream gets there."""
        ...

    def write_blocks(
        self, layers: Sequence[KVLayer], numbers: Sequence[int], places: Sequence[torch.Tensor]
    ) -> None:
        """The reverse of `read_blocks`; a GPU reads pinned places when its stream gets there."""
        ...

    def rope_and_cache(
        self,
        qkv_TX: torch.Tensor,
        cos_sin_PD: torch.Tensor,
        batch: Batch,
        layer: KVLayer | None,
        shape: AttentionShape,
        q_norm_D: torch.Tensor | None = None,
        k_norm_D: torch.Tensor | None = None,
        eps: float = 1e-6,
    ) -> torch.Tensor:
        """Norm q and k where weights are given, rotate them, cache k and v; returns q_TND. Without
        a layer, there is only q. cos_sin_PD: float32 by position, cos, then sin; feature i pairs
        with i + D/2."""
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
        form: LayerForm,
        all_reduce: AllReduce | None = None,
    ) -> DecoderStack | None:
        """All layers in one call; None where the backend has no fused stack.

        cos_sin_PD: for layers without a rotation of their own. all_reduce: of this backend, where
        ranks share the layers. Without a residual, x is the embedding. The caller norms last.
        """
        ...

    def shared_memory_all_reduce(
        self, rank: int, num_ranks: int, share: ShareFile
    ) -> AllReduce | None:
        """All-reduce among ranks of one machine; None, on all of them, where there is none."""
        ...

    def graph_support(self) -> GraphSupport | None:
        """None where forward passes cannot be captured in CUDA graphs."""
        ...

    # ---- sampling: semantics in `kernels.torch.sampling`; all backends draw the same tokens --

    def adjust_logits(self, logits_SV: torch.Tensor, adjustments: Sequence[Adjustment]) -> None:
        """Apply penalties, biases and masks in place to float32 logits; at most one per row."""
        ...

    def sample(self, logits_SV: torch.Tensor, rows: SamplingRows) -> NDArray[np.int64]:
        """One token id per row of adjusted float32 logits, which stay; -1: not finite."""
        ...

    def gumbel_argmax(
        self, logits_SV: torch.Tensor, rows: SamplingRows, first_id: int
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Gumbel-max over a vocabulary shard that begins at first_id: (scores_S, tokens_S). For
        rows without top_k, top_p and min_p."""
        ...

    def chosen_logprobs(
        self, logits_RV: torch.Tensor, tokens_R: torch.Tensor, num_top: int
    ) -> ChosenLogprobs:
        """Log-probability and rank of each row's token, and the num_top likeliest with their ids,
        under the unadjusted distribution."""
        ...
