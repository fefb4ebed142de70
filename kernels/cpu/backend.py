"""Backend "cpu": the C++ library of this folder behind `kernels.interface.Backend`.

Every operation is batch-invariant: a token has the same bits in any batch, with its prompt split
into any chunks, on any number of threads. Values are rounded where Hugging Face's Llama rounds.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.adapters import AdapterModule, AdapterRuns
from kernels.all_reduce import AllReduce, ShareFile
from kernels.cpu import adapters as lora
from kernels.cpu import kv as paged
from kernels.cpu import library, sampling
from kernels.cpu import recurrence as recurrent
from kernels.cpu.all_reduce import SharedMemoryAllReduce, file_bytes
from kernels.cpu.kv import ShapeView, as_cpu_layer, unsupported_head_dim, view_shape
from kernels.cpu.library import FLOAT_CODES, check, check_norm
from kernels.cpu.linear import CpuHeadLinears, CpuLinear, pack_linear, pack_quantized
from kernels.cpu.moe import moe
from kernels.cpu.stack import BatchView, CpuStack, view_batch
from kernels.interface import AttentionShape, Batch, KVLayer
from kernels.layer_form import ACTIVATIONS, LayerForm
from kernels.layer_weights import Experts, HeadLinears, LayerWeights, Linear
from kernels.quantized import QuantizedWeight, concatenate
from kernels.sampling import Adjustment, ChosenLogprobs, SamplingRows
from kernels.torch.backend import TorchBackend
from kernels.torch.rope import rotated_queries


@functools.cache
def _function(name: str) -> Any:
    pointer, int64 = library.Pointer, ctypes.c_int64
    geometry = (ctypes.POINTER(BatchView), ctypes.POINTER(ShapeView))
    signatures: dict[str, tuple[Any, ...]] = {
        "norm": (*[pointer] * 4, int64, int64, ctypes.c_float, *[ctypes.c_int32] * 2),
        "layer_norm": (*[pointer] * 4, int64, int64, ctypes.c_float, ctypes.c_int32),
        "activate": (pointer, pointer, int64, int64, *[ctypes.c_int32] * 3),
        "rope_and_cache": (*geometry, *[pointer] * 6, ctypes.c_int32, ctypes.c_float),
        "attention": (*geometry, *[pointer] * 3),
    }
    return library.function(f"legato_{name}", None, *signatures[name])


class CpuBackend(TorchBackend):
    """See the module docstring. Raises RuntimeError where the library cannot be loaded."""

    name = "cpu"
    kv_dtypes: Mapping[str, torch.dtype] = MappingProxyType({"int8": torch.int8})
    quantizations: tuple[str, ...] = ("int8", "int4", "w8a8", "w4a8")
    causal_conv = staticmethod(recurrent.causal_conv)
    recurrence = staticmethod(recurrent.recurrence)

    def __init__(self) -> None:
        library.require()

    def unsupported(
        self, dtype: torch.dtype, block_size: int | None = None, head_dim: int | None = None
    ) -> str | None:
        return None if head_dim is None else unsupported_head_dim(head_dim)

    def instruction_set(self, device: torch.device) -> str:
        return library.isa().name.lower()

    def set_num_threads(self, num_threads: int) -> None:
        super().set_num_threads(num_threads)
        library.set_num_threads(num_threads)

    def finish_loading(self) -> None:
        """Stop torch's intra-op threads. It uses them for any operation on 32768 elements, such as
        57 embeddings of 576, and they then spin for milliseconds on the library's cores."""
        torch.set_num_threads(1)

    def pack_linear(
        self, weight_OK: torch.Tensor, bias_O: torch.Tensor | None, quantization: str = "none"
    ) -> CpuLinear:
        return pack_linear(weight_OK, bias_O, quantization)

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
            return super().pack_quantized(weights, bias_O, dtype, device)
        return pack_quantized(weight, bias_O, dtype)

    def pack_heads(self, weight_NOK: torch.Tensor) -> HeadLinears:
        return CpuHeadLinears(weight_NOK)

    def rms_norm(self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        check("x_TH", x_TH, 2)
        y_TH = torch.empty_like(x_TH)
        self._norm(x_TH, None, weight_H, y_TH, eps)
        return y_TH

    def add_rms_norm(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> torch.Tensor:
        check("x_TH", x_TH, 2)
        check("residual_TH", residual_TH, 2, x_TH.dtype, x_TH.shape)
        y_TH = torch.empty_like(x_TH)
        self._norm(x_TH, residual_TH.data_ptr(), weight_H, y_TH, eps)
        return y_TH

    def _norm(
        self,
        x_TH: torch.Tensor,
        residual: int | None,
        weight_H: torch.Tensor,
        y_TH: torch.Tensor,
        eps: float,
    ) -> None:
        is_wide = check_norm("weight_H", weight_H, x_TH.dtype, x_TH.shape[1])
        _function("norm")(
            x_TH.data_ptr(),
            residual,
            weight_H.data_ptr(),
            y_TH.data_ptr(),
            *x_TH.shape,
            eps,
            FLOAT_CODES[x_TH.dtype],
            is_wide,
        )

    def layer_norm(
        self, x_TH: torch.Tensor, weight_H: torch.Tensor, bias_H: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        check("x_TH", x_TH, 2)
        for name, vector_H in (("weight_H", weight_H), ("bias_H", bias_H)):
            if vector_H is not None:
                check(name, vector_H, 1, x_TH.dtype, x_TH.shape[1:])
        y_TH = torch.empty_like(x_TH)
        _function("layer_norm")(
            x_TH.data_ptr(),
            weight_H.data_ptr(),
            library.pointer(bias_H),
            y_TH.data_ptr(),
            *x_TH.shape,
            eps,
            FLOAT_CODES[x_TH.dtype],
        )
        return y_TH

    def activate(self, x_TX: torch.Tensor, activation: str, gated: bool) -> torch.Tensor:
        check("x_TX", x_TX, 2)
        num_tokens, width = x_TX.shape
        if gated and width % 2:
            raise ValueError(f"x_TX has an odd width, {width}, and cannot be gate and up")
        y_TI = torch.empty((num_tokens, width // 2 if gated else width), dtype=x_TX.dtype)
        _function("activate")(
            x_TX.data_ptr(),
            y_TI.data_ptr(),
            *y_TI.shape,
            FLOAT_CODES[x_TX.dtype],
            ACTIVATIONS.index(activation),
            gated,
        )
        return y_TI

    def moe(self, x_TH: torch.Tensor, experts: Experts, form: LayerForm) -> torch.Tensor:
        return moe(self, x_TH, experts, form)

    def add_adapters(
        self, module: AdapterModule, x_TK: torch.Tensor, y_TO: torch.Tensor, runs: AdapterRuns
    ) -> None:
        lora.add_adapters(module, x_TK, y_TO, runs)

    def allocate_kv(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        shape: AttentionShape,
        dtype: torch.dtype,
        device: torch.device,
    ) -> list[KVLayer]:
        """dtype: float32, bfloat16, float16 or int8, with any dtype of the model."""
        if torch.device(device).type != "cpu":
            raise ValueError(f"the cpu backend keeps no cache on {device}")
        return [*paged.allocate(num_layers, num_blocks, block_size, shape, dtype)]

    def wait_for_memory(self, layers: Sequence[KVLayer], limit_s: float) -> None:
        if layers:  # all are backed together
            as_cpu_layer(layers[0]).prefault.wait(limit_s)

    def kv_block_bytes(self, block_size: int, shape: AttentionShape, dtype: torch.dtype) -> int:
        return paged.block_bytes(block_size, shape, dtype)

    def copy_blocks(self, layers: Sequence[KVLayer], pairs: Sequence[tuple[int, int]]) -> None:
        paged.copy_blocks(layers, pairs)

    def read_block(self, layer: KVLayer, block: int) -> torch.Tensor:
        return paged.read_block(layer, block)

    def write_block(self, layer: KVLayer, block: int, data: torch.Tensor) -> None:
        paged.write_block(layer, block, data)

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
        cache = as_cpu_layer(layer)
        batch_view = view_batch(batch, cache.block_size)
        cache.prefault.step_goes_on(batch.slot_mapping_T, cache.block_size)
        num_tokens, dim = batch_view.num_tokens, shape.head_dim
        width = (shape.num_heads + 2 * shape.num_kv_heads) * dim
        check("qkv_TX", qkv_TX, 2, shape=(num_tokens, width))
        check("cos_sin_PD", cos_sin_PD, 2, torch.float32, (cos_sin_PD.shape[0], dim))
        are_wide = {
            check_norm(name, norm_D, qkv_TX.dtype, dim)
            for name, norm_D in (("q_norm_D", q_norm_D), ("k_norm_D", k_norm_D))
            if norm_D is not None
        }
        if len(are_wide) > 1:
            raise ValueError("q_norm_D and k_norm_D are of two types")
        if batch.max_kv_length > cos_sin_PD.shape[0]:
            raise ValueError(
                f"position {batch.max_kv_length - 1} lies past the {len(cos_sin_PD)} of cos_sin_PD"
            )
        q_TND = torch.empty((num_tokens, shape.num_heads, dim), dtype=qkv_TX.dtype)
        _function("rope_and_cache")(
            batch_view,
            view_shape(shape, cache, qkv_TX.dtype),
            qkv_TX.data_ptr(),
            cos_sin_PD.data_ptr(),
            q_TND.data_ptr(),
            cache.data.data_ptr(),
            library.pointer(q_norm_D),
            library.pointer(k_norm_D),
            True in are_wide,
            eps,
        )
        return q_TND

    def attention(
        self, q_TND: torch.Tensor, batch: Batch, layer: KVLayer, shape: AttentionShape
    ) -> torch.Tensor:
        cache = as_cpu_layer(layer)
        batch_view = view_batch(batch, cache.block_size)
        num_tokens, width = batch_view.num_tokens, shape.num_heads * shape.head_dim
        check("q_TND", q_TND, 3, shape=(num_tokens, shape.num_heads, shape.head_dim))
        out_TX = torch.empty((num_tokens, width), dtype=q_TND.dtype)
        _function("attention")(
            batch_view,
            view_shape(shape, cache, q_TND.dtype, batch.max_kv_length),
            q_TND.data_ptr(),
            cache.data.data_ptr(),
            out_TX.data_ptr(),
        )
        return out_TX

    def decoder_stack(
        self,
        layers: Sequence[LayerWeights],
        kv: Sequence[KVLayer],
        cos_sin_PD: torch.Tensor,
        shape: AttentionShape,
        form: LayerForm,
        all_reduce: AllReduce | None = None,
    ) -> CpuStack | None:
        if any(w.experts is not None for w in layers):
            return None
        return CpuStack(layers, kv, cos_sin_PD, shape, form, all_reduce)

    def shared_memory_all_reduce(
        self, rank: int, num_ranks: int, share: ShareFile
    ) -> SharedMemoryAllReduce | None:
        fd = share(file_bytes(num_ranks))
        if fd is None:
            return None
        try:
            return SharedMemoryAllReduce(fd, rank, num_ranks)
        finally:
            os.close(fd)

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
