"""Backend "torch": every operation of `Backend` in PyTorch, on any device, in any float type.

It is the base class of the other backends and their reference: written to be read, correct for
every shape, and fast enough for tests. Arithmetic that rounds badly (norms, softmax, rotation)
runs in float32.

Shape suffixes as in `kernels.interface`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from kernels import adapters as lora
from kernels.adapters import AdapterModule, AdapterRuns
from kernels.all_reduce import AllReduce, PeerMemory, ShareFile
from kernels.graph_support import GraphSupport
from kernels.interface import AttentionShape, Batch, DecoderStack, KVLayer
from kernels.layer_form import LayerForm
from kernels.layer_weights import Experts, HeadLinears, LayerWeights, Linear
from kernels.packing import pack_quantized
from kernels.quantized import QuantizedWeight, concatenate, fake_quantize
from kernels.recurrence import Recurrence, StateLayer, StateRows
from kernels.sampling import Adjustment, ChosenLogprobs, SamplingRows
from kernels.torch import moe, recurrence, sampling
from kernels.torch.attention import TorchKVLayer, attend
from kernels.torch.linear import TorchHeadLinears, TorchLinear, TorchQuantizedLinear
from kernels.torch.rope import rotate, rotated_queries


def _clamped_gate(x: torch.Tensor) -> torch.Tensor:
    x = x.clamp(max=7.0)
    return x * torch.sigmoid(1.702 * x)


_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "clamped_swiglu": _clamped_gate,
    "relu2": lambda x: functional.relu(x).square(),
}


class TorchBackend:
    """See the module docstring."""

    name = "torch"
    kv_dtypes: Mapping[str, torch.dtype] = MappingProxyType({})
    quantizations: tuple[str, ...] = ("int8", "int4")
    dense_linear: type[TorchLinear] = TorchLinear
    quantized_linear: type[TorchQuantizedLinear] = TorchQuantizedLinear

    def unsupported(
        self, dtype: torch.dtype, block_size: int | None = None, head_dim: int | None = None
    ) -> str | None:
        return None

    def unsupported_quantization(self, quantization: str) -> str | None:
        return None

    def instruction_set(self, device: torch.device) -> str:
        if device.type == "cuda":
            return torch.cuda.get_device_name(device)
        return str(torch.backends.cpu.get_cpu_capability())

    def set_num_threads(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)

    def finish_loading(self) -> None:
        """Nothing to do: torch keeps its threads."""

    def pack_linear(
        self, weight_OK: torch.Tensor, bias_O: torch.Tensor | None, quantization: str = "none"
    ) -> Linear:
        if quantization != "none":
            weight_OK = fake_quantize(weight_OK, quantization)
        out_features, in_features = weight_OK.shape
        return self.dense_linear(weight_OK.contiguous(), bias_O, in_features, out_features)

    def pack_quantized(
        self,
        weights: Sequence[QuantizedWeight],
        bias_O: torch.Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Linear:
        try:
            weight = concatenate(weights)
        except ValueError:
            # Group sizes or input orders differ: only a dense matrix can fuse them.
            weight_OK = torch.cat([weight.dequantize(dtype) for weight in weights])
            return self.pack_linear(weight_OK.to(device), bias_O)
        return self._packed(weight, bias_O, device)

    def _packed(
        self, weight: QuantizedWeight, bias_O: torch.Tensor | None, device: torch.device
    ) -> Linear:
        order_K = weight.permutation_K
        return self.quantized_linear(
            pack_quantized(weight).to(device),
            bias_O,
            None if order_K is None else order_K.to(device, torch.int32),
        )

    def pack_heads(self, weight_NOK: torch.Tensor) -> HeadLinears:
        return TorchHeadLinears(weight_NOK.transpose(1, 2).contiguous())

    def add_adapters(
        self, module: AdapterModule, x_TK: torch.Tensor, y_TO: torch.Tensor, runs: AdapterRuns
    ) -> None:
        lora.add_adapters(module, x_TK, y_TO, runs)

    def prepare_adapters(self, module: AdapterModule) -> None:
        """Nothing to do: torch's kernels are compiled."""

    def rms_norm(self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        wide_TH = x_TH.float()
        scale_T1 = torch.rsqrt(wide_TH.square().mean(-1, keepdim=True) + eps)
        if weight_H.dtype != x_TH.dtype:
            return (weight_H * (wide_TH * scale_T1)).to(x_TH.dtype)
        return weight_H * (wide_TH * scale_T1).to(x_TH.dtype)

    def add_rms_norm(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> torch.Tensor:
        residual_TH += x_TH
        return self.rms_norm(residual_TH, weight_H, eps)

    def reduce_add_rms_norm(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float,
        peers: PeerMemory,
    ) -> torch.Tensor | None:  # fmt: skip
        return None

    def layer_norm(
        self, x_TH: torch.Tensor, weight_H: torch.Tensor, bias_H: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        return functional.layer_norm(x_TH, weight_H.shape, weight_H, bias_H, eps)

    def activate(self, x_TX: torch.Tensor, activation: str, gated: bool) -> torch.Tensor:
        if not gated:
            return _ACTIVATIONS[activation](x_TX)
        gate_TI, up_TI = x_TX.chunk(2, dim=-1)
        if activation == "clamped_swiglu":
            up_TI = up_TI.clamp(-7.0, 7.0) + 1.0
        return _ACTIVATIONS[activation](gate_TI) * up_TI

    def moe(self, x_TH: torch.Tensor, experts: Experts, form: LayerForm) -> torch.Tensor:
        return moe.moe(self, x_TH, experts, form)

    def measure_attention(
        self, shapes: Sequence[AttentionShape], kv_dtype: torch.dtype, block_size: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        """There is one way."""

    def allocate_kv(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        shape: AttentionShape,
        dtype: torch.dtype,
        device: torch.device,
    ) -> list[KVLayer]:
        size = (num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
        return [
            TorchKVLayer(
                torch.zeros(size, dtype=dtype, device=device),
                torch.zeros(size, dtype=dtype, device=device),
            )
            for _ in range(num_layers)
        ]

    def wait_for_memory(self, layers: Sequence[KVLayer], limit_s: float) -> None:
        """Nothing to wait for: torch's memory comes with its first use."""

    def kv_block_bytes(self, block_size: int, shape: AttentionShape, dtype: torch.dtype) -> int:
        return 2 * block_size * shape.num_kv_heads * shape.head_dim * dtype.itemsize

    def copy_blocks(self, layers: Sequence[KVLayer], pairs: Sequence[tuple[int, int]]) -> None:
        for layer in layers:
            kv = _as_torch_layer(layer)
            for source, destination in pairs:  # in order: a later pair may read an earlier one's
                kv.keys[destination] = kv.keys[source]
                kv.values[destination] = kv.values[source]

    def read_block(self, layer: KVLayer, block: int) -> torch.Tensor:
        kv = _as_torch_layer(layer)
        return torch.stack((kv.keys[block], kv.values[block])).cpu()

    def write_block(self, layer: KVLayer, block: int, data: torch.Tensor) -> None:
        kv = _as_torch_layer(layer)
        kv.keys[block].copy_(data[0])
        kv.values[block].copy_(data[1])

    def read_blocks(
        self, layers: Sequence[KVLayer], numbers: Sequence[int], places: Sequence[torch.Tensor]
    ) -> None:
        for number, place in zip(numbers, places, strict=True):
            for layer, part in zip(layers, place, strict=True):
                part.copy_(self.read_block(layer, number))

    def write_blocks(
        self, layers: Sequence[KVLayer], numbers: Sequence[int], places: Sequence[torch.Tensor]
    ) -> None:
        for number, place in zip(numbers, places, strict=True):
            for layer, part in zip(layers, place, strict=True):
                self.write_block(layer, number, part)

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
        kv = _as_torch_layer(layer)
        num_tokens, heads, kv_heads = qkv_TX.shape[0], shape.num_heads, shape.num_kv_heads
        qkv_THD = qkv_TX.view(num_tokens, heads + 2 * kv_heads, shape.head_dim)
        q_TND, k_TGD, v_TGD = torch.split(qkv_THD, [heads, kv_heads, kv_heads], dim=1)
        cos_sin_T1D = cos_sin_PD[batch.positions_T.long()].unsqueeze(1)

        def turned(x: torch.Tensor, norm_D: torch.Tensor | None) -> torch.Tensor:
            if norm_D is None:
                return rotate(x, cos_sin_T1D)
            if shape.norms_last:
                return self.rms_norm(rotate(x, cos_sin_T1D), norm_D, eps)
            return rotate(self.rms_norm(x, norm_D, eps), cos_sin_T1D)

        slot_mapping_T = batch.slot_mapping_T.long()
        kv.keys.flatten(0, 1)[slot_mapping_T] = turned(k_TGD, k_norm_D).to(kv.keys.dtype)
        kv.values.flatten(0, 1)[slot_mapping_T] = v_TGD.to(kv.values.dtype)
        return turned(q_TND, q_norm_D).contiguous()

    def attention(
        self, q_TND: torch.Tensor, batch: Batch, layer: KVLayer, shape: AttentionShape
    ) -> torch.Tensor:
        return attend(q_TND, batch, _as_torch_layer(layer), shape)

    def decoder_stack(
        self,
        layers: Sequence[LayerWeights],
        kv: Sequence[KVLayer],
        cos_sin_PD: torch.Tensor,
        shape: AttentionShape,
        form: LayerForm,
        all_reduce: AllReduce | None = None,
    ) -> DecoderStack | None:
        return None

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

    def shared_memory_all_reduce(
        self, rank: int, num_ranks: int, share: ShareFile
    ) -> AllReduce | None:
        return None

    def graph_support(self) -> GraphSupport | None:
        return None

    def adjust_logits(self, logits_SV: torch.Tensor, adjustments: Sequence[Adjustment]) -> None:
        sampling.adjust(logits_SV, adjustments)

    def sample(self, logits_SV: torch.Tensor, rows: SamplingRows) -> NDArray[np.int64]:
        return sampling.sample(logits_SV, rows)

    def gumbel_argmax(
        self, logits_SV: torch.Tensor, rows: SamplingRows, first_id: int
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        return sampling.gumbel_argmax(logits_SV, rows, first_id)

    def chosen_logprobs(
        self, logits_RV: torch.Tensor, tokens_R: torch.Tensor, num_top: int
    ) -> ChosenLogprobs:
        return sampling.chosen_logprobs(logits_RV, tokens_R, num_top)


def _as_torch_layer(layer: KVLayer) -> TorchKVLayer:
    if not isinstance(layer, TorchKVLayer):
        raise TypeError(f"the torch backend was given a cache of {type(layer).__name__}")
    return layer
