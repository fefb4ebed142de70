"""All decoder layers of a stage in one C++ call (src/stack.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import torch

from kernels.adapters import AdapterModule, LayerAdapters
from kernels.all_reduce import AllReduce
from kernels.cpu import library
from kernels.cpu.adapters import CpuAdapters, RunsView, view_runs
from kernels.cpu.all_reduce import SharedMemoryAllReduce, check
from kernels.cpu.kv import CpuKVLayer, ShapeView, as_cpu_layer, view_shape
from kernels.cpu.linear import CpuLinear
from kernels.cpu.prefault import Prefault
from kernels.interface import AttentionShape, Batch, KVLayer
from kernels.layer_form import ACTIVATIONS, LayerForm
from kernels.layer_weights import LayerWeights, Linear


class BatchView(ctypes.Structure):
    """Addresses of a Batch's tensors (src/attention_layout.h); valid while they live."""

    _fields_ = (
        ("positions", ctypes.c_void_p),
        ("query_starts", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("slot_mapping", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int32),
        ("num_slices", ctypes.c_int32),
        ("table_width", ctypes.c_int32),
    )


def view_batch(batch: Batch, block_size: int) -> BatchView:
    """The batch's addresses. Raises ValueError for dtypes, shapes or lengths that would access
    memory out of bounds, as far as O(1) checks can tell."""
    num_slices = len(batch.starts_S)
    num_tokens = len(batch.positions_T)
    table_width = batch.block_tables_SB.shape[1] if batch.block_tables_SB.dim() == 2 else -1
    expected = (
        ("positions_T", batch.positions_T, (num_tokens,)),
        ("query_starts_S1", batch.query_starts_S1, (num_slices + 1,)),
        ("starts_S", batch.starts_S, (num_slices,)),
        ("lengths_S", batch.lengths_S, (num_slices,)),
        ("block_tables_SB", batch.block_tables_SB, (num_slices, table_width)),
        ("slot_mapping_T", batch.slot_mapping_T, (num_tokens,)),
    )
    addresses: list[int] = []
    for name, tensor, size in expected:
        if tensor.dtype != torch.int32 or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ValueError(f"batch.{name} must be a contiguous int32 tensor on the CPU")
        if tensor.shape != size:
            raise ValueError(f"batch.{name} has shape {tuple(tensor.shape)}, expected {size}")
        addresses.append(tensor.data_ptr())
    if batch.max_kv_length > table_width * block_size:
        raise ValueError(
            f"block tables of {table_width} blocks of {block_size} tokens cannot hold "
            f"{batch.max_kv_length}"
        )
    return BatchView(*addresses, num_tokens, num_slices, table_width)


class _LayerView(ctypes.Structure):
    _fields_ = (
        ("input_norm", ctypes.c_void_p),
        ("input_norm_bias", ctypes.c_void_p),
        ("qkv", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("attention_out_norm", ctypes.c_void_p),
        ("post_norm", ctypes.c_void_p),
        ("post_norm_bias", ctypes.c_void_p),
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("mlp_out_norm", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("cache", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("query_scales", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("sliding_window", ctypes.c_int32),
        ("adapters", ctypes.c_void_p * 4),
    )


class _StackView(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.c_void_p),
        ("shape", ShapeView),
        ("num_layers", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("activation", ctypes.c_int32),
        ("centered", ctypes.c_bool),
        ("gated", ctypes.c_bool),
        ("parallel", ctypes.c_bool),
        ("whole_qk_norm", ctypes.c_bool),
        ("wide_norms", ctypes.c_bool),
        ("all_reduce", ctypes.c_void_p),
    )


class CpuStack:
    """Implements `DecoderStack`.

    The residual (x_TH itself where there is none) is updated in place and returned; the results are
    bit-identical to those of the separate operations.
    """

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        kv: Sequence[KVLayer],
        cos_sin_PD: torch.Tensor,
        shape: AttentionShape,
        form: LayerForm,
        all_reduce: AllReduce | None = None,
    ) -> None:
        if not layers or len(layers) != len(kv):
            raise ValueError(f"{len(layers)} layers and {len(kv)} caches make no stack")
        tables = [cos_sin_PD if w.cos_sin_PD is None else w.cos_sin_PD for w in layers]
        by_position = [*tables, *(w.query_scales_P for w in layers if w.query_scales_P is not None)]
        if any(t.dtype != torch.float32 or not t.is_contiguous() for t in by_position):
            raise ValueError("cos_sin_PD and query_scales_P must be contiguous float32")
        caches = [as_cpu_layer(layer) for layer in kv]
        linears = [
            tuple(_packed(linear) for linear in (w.qkv, w.out, w.gate_up, w.down)) for w in layers
        ]
        self._dtype = linears[0][0].dtype
        self._hidden = linears[0][0].in_features
        inner = linears[0][3].in_features  # one for all, like the other sizes
        wide = [
            is_wide
            for w, four in zip(layers, linears, strict=True)
            for is_wide in _check_layer(w, four, shape, form, self._dtype, self._hidden, inner)
        ]
        if any(wide) and (not all(wide) or form.norm == "layer"):
            raise ValueError(f"norms of float32 and of {self._dtype}, or layer norms of float32")
        adapters = [
            _adapters(w.adapters, four, self._dtype)
            for w, four in zip(layers, linears, strict=True)
        ]
        self._num_slots = max((a.num_slots for four in adapters for a in four if a), default=0)
        # Addresses below point into these.
        self._kept = (list(layers), linears, caches, tables, all_reduce, adapters, shape)
        self._block_size = caches[0].block_size
        self._prefault: Prefault | None = caches[0].prefault  # None once it is done
        self._positions = min(table.shape[0] for table in by_position)
        if shape.alibi_NP is not None:
            self._positions = min(self._positions, shape.alibi_NP.shape[1])
        parts = zip(layers, linears, caches, tables, adapters, strict=True)
        self._layers = (_LayerView * len(layers))(*(_layer_view(*part, shape) for part in parts))
        # The stack has one shape; that of each layer is viewed for the errors it may raise.
        views = [
            view_shape(
                replace(shape, sliding_window=w.sliding_window, sinks_N=w.sinks_N),
                cache,
                self._dtype,
            )
            for w, cache in zip(layers, caches, strict=True)
        ]
        self._view = _StackView(
            ctypes.addressof(self._layers), views[0], len(layers), form.eps,
            ACTIVATIONS.index(form.activation), form.norm == "layer", form.gated, form.parallel,
            form.whole_qk_norm, any(wide),
            all_reduce.handle if isinstance(all_reduce, SharedMemoryAllReduce) else None,
        )  # fmt: skip
        views_given = map(ctypes.POINTER, (_StackView, BatchView, RunsView))
        self._run = library.function(
            "legato_stack_run", ctypes.c_int32, *views_given, *[library.Pointer] * 3
        )

    def __call__(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor | None, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        view = view_batch(batch, self._block_size)
        if batch.max_kv_length > self._positions:
            raise ValueError(
                f"position {batch.max_kv_length - 1} lies past the {self._positions} of the "
                "position tables"
            )
        x_TH = self._checked(x_TH, view.num_tokens)
        added = 0  # address of the x still to be added to the residual; null: nothing
        if residual_TH is None:
            residual_TH = x_TH
        else:
            added = x_TH.data_ptr()
            residual_TH = self._checked(residual_TH, view.num_tokens)
        out_TH = torch.empty_like(residual_TH)
        runs = None
        if batch.adapters is not None:
            runs = view_runs(batch.adapters, self._num_slots, view.num_tokens)
        prefault = self._prefault
        if prefault is not None:
            prefault.step_begins(int(batch.slot_mapping_T.max()) // self._block_size + 1)
        error = self._run(self._view, view, runs, added, residual_TH.data_ptr(), out_TH.data_ptr())
        if prefault is not None:
            prefault.step_ends()
            if prefault.is_done:
                self._prefault = None
        if error:
            check(error)
        return out_TH, residual_TH

    def _checked(self, x_TH: torch.Tensor, num_tokens: int) -> torch.Tensor:
        if x_TH.shape != (num_tokens, self._hidden) or x_TH.dtype != self._dtype:
            raise ValueError(
                f"x is {tuple(x_TH.shape)} {x_TH.dtype}, not ({num_tokens}, {self._hidden}) "
                f"{self._dtype}"
            )
        return x_TH if x_TH.is_contiguous() else x_TH.contiguous()


def _packed(linear: Linear | None) -> CpuLinear:
    if not isinstance(linear, CpuLinear):
        raise TypeError(f"the cpu backend was given a layer of {type(linear).__name__}")
    return linear


def _adapters(
    layer: LayerAdapters, linears: tuple[CpuLinear, ...], dtype: torch.dtype
) -> list[CpuAdapters | None]:
    found: list[CpuAdapters | None] = []
    modules: tuple[AdapterModule | None, ...] = (layer.qkv, layer.out, layer.gate_up, layer.down)
    for linear, module in zip(linears, modules, strict=True):
        adapters = None if module is None else CpuAdapters(module)
        if adapters is not None:
            sizes = (adapters.in_features, adapters.out_features, adapters.dtype)
            if sizes != (linear.in_features, linear.out_features, dtype):
                raise ValueError(f"adapters of {sizes} for a layer of {linear.out_features}")
        found.append(adapters)
    return found


def _layer_view(
    weights: LayerWeights,
    linears: tuple[CpuLinear, ...],
    cache: CpuKVLayer,
    cos_sin_PD: torch.Tensor,
    adapters: list[CpuAdapters | None],
    shape: AttentionShape,
) -> _LayerView:
    qkv, out, gate_up, down = linears
    return _LayerView(
        input_norm=library.pointer(weights.input_norm_H),
        input_norm_bias=library.pointer(weights.input_norm_bias_H),
        qkv=qkv.handle,
        out=out.handle,
        attention_out_norm=library.pointer(weights.attention_out_norm_H),
        post_norm=library.pointer(weights.post_norm_H),
        post_norm_bias=library.pointer(weights.post_norm_bias_H),
        gate_up=gate_up.handle,
        down=down.handle,
        mlp_out_norm=library.pointer(weights.mlp_out_norm_H),
        q_norm=library.pointer(weights.q_norm_D),
        k_norm=library.pointer(weights.k_norm_D),
        cache=cache.data.data_ptr(),
        cos_sin=cos_sin_PD.data_ptr(),
        query_scales=library.pointer(weights.query_scales_P),
        sinks=library.pointer(weights.sinks_N),
        sliding_window=replace(shape, sliding_window=weights.sliding_window).window_code,
        adapters=(ctypes.c_void_p * 4)(*[None if a is None else a.address for a in adapters]),
    )


def _check_layer(
    weights: LayerWeights,
    linears: tuple[CpuLinear, ...],
    shape: AttentionShape,
    form: LayerForm,
    dtype: torch.dtype,
    hidden: int,
    inner: int,
) -> list[bool]:
    """Which of the layer's norms are wider than dtype."""
    qkv, out, gate_up, down = linears
    attended = shape.num_heads * shape.head_dim
    qkv_width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    sizes = (
        ("qkv", qkv, hidden, qkv_width),
        ("out", out, attended, hidden),
        ("gate_up", gate_up, hidden, 2 * inner if form.gated else inner),
        ("down", down, inner, hidden),
    )
    for name, linear, in_features, out_features in sizes:
        if (linear.in_features, linear.out_features) != (in_features, out_features):
            raise ValueError(
                f"{name} is {linear.out_features} x {linear.in_features}, "
                f"not {out_features} x {in_features}"
            )
        if linear.dtype != dtype:
            raise ValueError(f"{name} computes in {linear.dtype}, not {dtype}")
    q_heads, k_heads = (shape.num_heads, shape.num_kv_heads) if form.whole_qk_norm else (1, 1)
    wide: list[bool] = []  # of each norm
    norms = (
        ("input_norm_H", weights.input_norm_H, hidden),
        ("input_norm_bias_H", weights.input_norm_bias_H, hidden),
        ("attention_out_norm_H", weights.attention_out_norm_H, hidden),
        ("post_norm_H", weights.post_norm_H, hidden),
        ("post_norm_bias_H", weights.post_norm_bias_H, hidden),
        ("mlp_out_norm_H", weights.mlp_out_norm_H, hidden),
        ("q_norm_D", weights.q_norm_D, q_heads * shape.head_dim),
        ("k_norm_D", weights.k_norm_D, k_heads * shape.head_dim),
    )
    for name, norm, width in norms:
        if norm is not None:
            wide.append(library.check_norm(name, norm, dtype, width))
    return wide
