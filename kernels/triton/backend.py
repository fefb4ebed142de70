"""Backend "triton": Triton kernels for everything but dense matrix products of many tokens, which
are cuBLAS's; those of experts are Triton's at any size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.adapters import AdapterModule, AdapterRuns
from kernels.all_reduce import PeerMemory
from kernels.device_time import graph_time_s
from kernels.graph_support import GraphSupport
from kernels.interface import AttentionShape, Batch, KVLayer
from kernels.layer_form import LayerForm
from kernels.layer_weights import Experts, Linear
from kernels.packing import QUANTIZATIONS, pack_weight
from kernels.quantized import FLOAT8_ROUNDING, QuantizedWeight, quantize_rows
from kernels.recurrence import Recurrence, StateLayer, StateRows
from kernels.sampling import Adjustment, SamplingRows
from kernels.torch.backend import TorchBackend
from kernels.torch.rope import rotated_queries
from kernels.torch.sampling import gather_logprobs
from kernels.triton import adapters, blocks, cache, logits, recurrence, sampling
from kernels.triton import experts as mixture
from kernels.triton.activation import silu_mul
from kernels.triton.attention import Attention, Variant, one_launch_is_faster, variant_of
from kernels.triton.cache import FLOAT8, PagedKV
from kernels.triton.dense import DenseLinear
from kernels.triton.grouped import is_grouped
from kernels.triton.linear import QuantizedLinear
from kernels.triton.norm import rms_norm
from kernels.triton.reduce_norm import reduce_add_rms_norm
from kernels.triton.rope import rope_and_cache
from kernels.triton.rounded import RoundedLinear
from kernels.triton.tiles import (
    ADAPTER_ROWS,
    LEAST_ARCH,
    LEAST_ROUNDED_FLOAT8_ARCH,
    target_arch,
    unsupported_heads,
)


class TritonBackend(TorchBackend):
    """Any block size, any grouping, head dims to 576, windows, softcap, sinks, ALiBi,
    float8 KV.

    There is no fused stack of layers: on a GPU CUDA graphs amortize the launches.
    """

    name = "triton"
    kv_dtypes: Mapping[str, torch.dtype] = MappingProxyType({"fp8": FLOAT8})
    captures_hybrid = True  # see GraphSupport
    dense_linear = DenseLinear
    quantizations: tuple[str, ...] = (*QUANTIZATIONS, "w8a8", FLOAT8_ROUNDING)
    quantized_linear = QuantizedLinear

    def __init__(self, one_launch: bool | None = None) -> None:
        """one_launch: decodes and chunks of a hybrid batch share a launch of attention; None: where
        `measure_attention` has found that faster."""
        self._attention = Attention()
        self.one_launch = one_launch
        self._is_faster: dict[Variant, bool] = {}  # one launch, by kind of layer

    def unsupported(
        self, dtype: torch.dtype, block_size: int | None = None, head_dim: int | None = None
    ) -> str | None:
        problem = _too_old_for(LEAST_ARCH)
        return None if problem is None else f"it {problem}"

    def pack_linear(
        self, weight_OK: torch.Tensor, bias_O: torch.Tensor | None, quantization: str = "none"
    ) -> Linear:
        if quantization == "none":
            linear = super().pack_linear(weight_OK, bias_O)
            if weight_OK.is_cuda and isinstance(linear, DenseLinear):
                linear.warm()
            return linear
        if quantization not in QUANTIZATIONS:
            rounded = quantize_rows(weight_OK, quantization)
            return RoundedLinear(rounded, bias_O, weight_OK.device)
        return QuantizedLinear(pack_weight(weight_OK, quantization), bias_O)

    def unsupported_quantization(self, quantization: str) -> str | None:
        if quantization != FLOAT8_ROUNDING:
            return None
        problem = _too_old_for(LEAST_ROUNDED_FLOAT8_ARCH)
        return None if problem is None else f"{quantization!r} {problem}"

    def _packed(
        self, weight: QuantizedWeight, bias_O: torch.Tensor | None, device: torch.device
    ) -> Linear:
        if weight.input_rounding == "none":
            return super()._packed(weight, bias_O, device)
        return RoundedLinear(weight, bias_O, device)

    def add_adapters(
        self, module: AdapterModule, x_TK: torch.Tensor, y_TO: torch.Tensor, runs: AdapterRuns
    ) -> None:
        adapters.add_adapters(module, x_TK, y_TO, runs)

    def prepare_adapters(self, module: AdapterModule) -> None:
        adapters.warm(module)

    def rms_norm(self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x_TH, weight_H, eps)

    def add_rms_norm(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return rms_norm(x_TH, weight_H, eps, residual_TH)

    def reduce_add_rms_norm(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float,
        peers: PeerMemory,
    ) -> torch.Tensor | None:  # fmt: skip
        if not peers.holds(x_TH):
            return None
        return reduce_add_rms_norm(x_TH, residual_TH, weight_H, eps, peers)

    def activate(self, x_TX: torch.Tensor, activation: str, gated: bool) -> torch.Tensor:
        if gated and activation == "silu":
            return silu_mul(x_TX)
        return super().activate(x_TX, activation, gated)

    def moe(self, x_TH: torch.Tensor, experts: Experts, form: LayerForm) -> torch.Tensor:
        return mixture.moe(self, x_TH, experts, form)

    def measure_attention(
        self, shapes: Sequence[AttentionShape], kv_dtype: torch.dtype, block_size: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        if self.one_launch is not None or device.type != "cuda":
            return
        time_s = partial(graph_time_s, repeats=3)
        for shape in shapes:
            variant = variant_of(shape)
            if variant not in self._is_faster:  # once, so that all graphs have the same kernels
                faster = one_launch_is_faster(shape, kv_dtype, block_size, device, time_s)
                self._is_faster[variant] = faster

    def allocate_kv(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        shape: AttentionShape,
        dtype: torch.dtype,
        device: torch.device,
    ) -> list[KVLayer]:
        layers = cache.allocate(num_layers, num_blocks, block_size, shape, dtype, device)
        if device.type == "cuda":  # other kernels are compiled by the step that measures memory
            logits.warm(device)
            blocks.warm(layers)
        return [*layers]

    def kv_block_bytes(self, block_size: int, shape: AttentionShape, dtype: torch.dtype) -> int:
        group = shape.num_heads // shape.num_kv_heads
        if problem := unsupported_heads(shape.head_dim, group, dtype.itemsize, target_arch()):
            raise ValueError(problem)
        return cache.block_bytes(block_size, shape, dtype)

    def copy_blocks(self, layers: Sequence[KVLayer], pairs: Sequence[tuple[int, int]]) -> None:
        blocks.copy_blocks([paged(layer) for layer in layers], pairs)

    def read_blocks(
        self, layers: Sequence[KVLayer], numbers: Sequence[int], places: Sequence[torch.Tensor]
    ) -> None:
        blocks.read_blocks([paged(layer) for layer in layers], numbers, places)

    def write_blocks(
        self, layers: Sequence[KVLayer], numbers: Sequence[int], places: Sequence[torch.Tensor]
    ) -> None:
        blocks.write_blocks([paged(layer) for layer in layers], numbers, places)

    def read_block(self, layer: KVLayer, block: int) -> torch.Tensor:
        return cache.read_block(paged(layer), block)

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
        if layer is None:
            return rotated_queries(self, qkv_TX, cos_sin_PD, batch, shape, q_norm_D, eps)
        return rope_and_cache(
            qkv_TX, cos_sin_PD, batch, paged(layer), shape, q_norm_D, k_norm_D, eps
        )

    def attention(
        self, q_TND: torch.Tensor, batch: Batch, layer: KVLayer, shape: AttentionShape
    ) -> torch.Tensor:
        one_launch = self.one_launch
        if one_launch is None:
            one_launch = self._is_faster.get(variant_of(shape), False)
        return self._attention(q_TND, batch, paged(layer), shape, one_launch)

    def causal_conv(
        self, x_TC: torch.Tensor, weight_JC: torch.Tensor, bias_C: torch.Tensor | None,
        layer: StateLayer, rows: StateRows, silu: bool,
    ) -> torch.Tensor:  # fmt: skip
        return recurrence.causal_conv(x_TC, weight_JC, bias_C, layer, rows, silu)

    def recurrence(
        self, qkv_TC: torch.Tensor, decays_TN: torch.Tensor, rates_TN: torch.Tensor,
        layer: StateLayer, rows: StateRows, form: Recurrence,
    ) -> torch.Tensor:  # fmt: skip
        return recurrence.recurrence(qkv_TC, decays_TN, rates_TN, layer, rows, form)

    def graph_support(self) -> GraphSupport | None:
        return GraphSupport(
            self.captures_hybrid, sampling.pack_rows, sampling.draw_rows, gather_logprobs,
            is_grouped, ADAPTER_ROWS,
        )  # fmt: skip

    def adjust_logits(self, logits_SV: torch.Tensor, adjustments: Sequence[Adjustment]) -> None:
        logits.adjust(logits_SV, adjustments)

    def sample(self, logits_SV: torch.Tensor, rows: SamplingRows) -> NDArray[np.int64]:
        return sampling.sample(logits_SV, rows)

    def gumbel_argmax(
        self, logits_SV: torch.Tensor, rows: SamplingRows, first_id: int
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        return sampling.gumbel_argmax(logits_SV, rows, first_id)


def _too_old_for(least: int) -> str | None:
    have, need = (f"{arch // 10}.{arch % 10}" for arch in (target_arch(), least))
    if target_arch() >= least:
        return None
    return f"needs a GPU of compute capability {need}, not {have}"


def paged(layer: KVLayer) -> PagedKV:
    if not isinstance(layer, PagedKV):
        raise TypeError(f"a GPU backend was given a cache of {type(layer).__name__}")
    return layer
