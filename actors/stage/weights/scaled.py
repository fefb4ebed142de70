"""Folders of compressed-tensors and float8: weights with scales, read as stored and cut for a rank.

Integers stay packed if the kernels represent them exactly, which requires scales that float16
represents, and e4m3 if its inputs are to be rounded too; all others are converted to the serving
type. Each rank reads whole layers and keeps its part.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from actors.stage.models.config import ModelError
from actors.stage.weights.checkpoint import Checkpoint
from actors.stage.weights.schemes import Scheme
from actors.stage.weights.source import WHOLE, PackedView, Shard, cut
from kernels.gptq_awq import unpack_compressed, unpack_int8
from kernels.quantized import FLOAT8_ROUNDING, MAX_GROUP, ROUNDING, InputRounding, QuantizedWeight

# Tensors beside a layer's weight. Scales of activations are not used.
SCALED_ENDINGS = (
    ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_zero_point", ".weight_g_idx",
    ".weight_shape", ".input_scale", ".output_scale", ".activation_scale",
)  # fmt: skip
# Types of weights by kind, as safetensors calls them; packed ones have a name of their own.
_STORED = {"int8": ("I8",), "float8": ("F8_E4M3", "F8_E5M2")}


class ScaledWeights:
    """A `WeightSource` of all tensors, and a `PackedSource` of those that stay packed.

    shapes: of the whole model's tensors, by name. ranks: number of ranks that split input
    features; a layer whose groups the split would cut is not packed. quantization: that of the
    settings, which may ask for inputs rounded as the scheme does. Raises ModelError naming the file
    for tensors that do not fit.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        scheme: Scheme,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        ranks: int = 1,
        quantization: str = "none",
    ) -> None:
        self.scheme = scheme
        if scheme.kind == "float8" and scheme.one_scale:  # transformers and Mistral's folders
            other = "weight_scale_inv"
            if any(name.endswith(f".{other}") for name in checkpoint.names):
                self.scheme = replace(scheme, scale=other)
        self._checkpoint = checkpoint
        self._last: tuple[str, QuantizedWeight] | None = None  # unpacked layer
        self._dtype = dtype
        self._ranks = ranks
        asked = (FLOAT8_ROUNDING,) if self.scheme.kind == "float8" else ROUNDING
        self.input_rounding: InputRounding = (
            self.scheme.input_rounding if quantization in asked else "none"
        )
        self.layers = {
            name.removesuffix(".weight"): (shape[0], shape[1])
            for name, shape in shapes.items()
            if f"{name.removesuffix('.weight')}.{self.scheme.scale}" in checkpoint.names
            and name.endswith(".weight")
            and len(shape) == 2
        }
        for layer in self.layers:
            self._check(layer)
        self._check_others(shapes)
        self.packed = PackedView(self.is_packed, self.read_packed)

    def stores(self, name: str) -> bool:
        return name.removesuffix(".weight") in self.layers or self._checkpoint.stores(name)

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        part: Shard = WHOLE,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        layer = name.removesuffix(".weight")
        if layer not in self.layers or not name.endswith(".weight"):
            return self._checkpoint.read(name, shape, part, dtype)
        rows = (0, shape[0]) if part.rows is None else part.rows
        dense = (
            self._float8(layer, rows) if self.scheme.kind == "float8" else self._rows(layer, rows)
        )
        if not torch.isfinite(dense.sum()):
            shard = self._checkpoint.file_of(self._name(layer))
            raise ModelError(f"{shard}: layer {layer} holds values that are not finite")
        columns = Shard(columns=part.columns)
        return cut(dense.to(dtype or self._dtype), columns).contiguous()

    @functools.cache  # noqa: B019 - lives only while loading, one entry per layer
    def is_packed(self, layer: str) -> bool:
        if layer not in self.layers:
            return False
        inputs, group = self.layers[layer][1], self._group
        if self.scheme.kind == "float8":
            return (
                self.input_rounding != "none"
                and group % 8 == 0
                and group <= MAX_GROUP
                and (self._ranks == 1 or not group or inputs % (group * self._ranks) == 0)
                and self._checkpoint.dtype_of(f"{layer}.weight") == "F8_E4M3"
            )
        if group and inputs % (group * self._ranks):
            return False
        if self.scheme.act_order and self._ranks > 1:
            return False
        scales = self._scales(layer)
        by_row = not group and self.scheme.symmetric  # such scales are float32
        return by_row or bool((scales.half().float() == scales).all())

    def read_packed(self, layer: str, part: Shard) -> QuantizedWeight:
        try:
            weight = self._unpack(layer)
            if self.input_rounding != "none":
                weight = replace(weight, input_rounding=self.input_rounding)
            if part.rows is not None:
                weight = weight.rows(*part.rows)
            if part.columns is not None and part.columns != (0, self.layers[layer][1]):
                weight = weight.columns(*part.columns)
        except ValueError as bad:
            raise self._unfit(layer, bad) from bad
        return weight

    def _check(self, layer: str) -> None:
        """Check the names, shapes and types of a layer's tensors; values are checked when read."""
        rows, columns = self.layers[layer]
        scheme = self.scheme
        groups = -(-columns // scheme.group) if scheme.group else 1
        if scheme.block is not None:
            rows_of_blocks, width = scheme.block
            num_scales = -(-rows // rows_of_blocks) * -(-columns // width)
        else:
            num_scales = 1 if scheme.one_scale else rows * groups
        wanted = {scheme.scale: num_scales, "weight": rows * columns}
        if scheme.kind == "packed":
            del wanted["weight"]
            wanted["weight_packed"] = rows * -(-columns * scheme.bits // 32)
        if not scheme.symmetric:
            words = -(-rows * scheme.bits // 32)
            wanted["weight_zero_point"] = words * groups if scheme.kind == "packed" else num_scales
        for ending, size in wanted.items():
            name = f"{layer}.{ending}"
            found = self._checkpoint.shape_of(name)
            if torch.Size(found).numel() != size:
                shard = self._checkpoint.file_of(name)
                raise ModelError(
                    f"{shard}: tensor {name} of shape {found} does not fit a layer of "
                    f"{rows} x {columns}"
                )
        if scheme.kind in _STORED:
            stored = self._checkpoint.dtype_of(f"{layer}.weight")
            if stored not in _STORED[scheme.kind]:
                raise self._unfit(layer, f"its weight is stored as {stored}, not {scheme.kind}")

    def _check_others(self, names: Iterable[str]) -> None:
        """Refuse a narrow tensor without its scale, which would be read as if the scale were 1."""
        narrow = _STORED.get(self.scheme.kind, ())
        for name in names:
            if name.removesuffix(".weight") in self.layers or not self._checkpoint.stores(name):
                continue
            if (stored := self._checkpoint.dtype_of(name)) in narrow:
                shard = self._checkpoint.file_of(name)
                scale = f"{name.removesuffix('.weight')}.{self.scheme.scale}"
                raise ModelError(f"{shard}: tensor {name} is {stored}, but {scale} is missing")

    def _name(self, layer: str) -> str:
        return f"{layer}.weight_packed" if self.scheme.kind == "packed" else f"{layer}.weight"

    def _raw(self, layer: str, ending: str) -> torch.Tensor:
        return self._checkpoint.read_raw(f"{layer}.{ending}")

    def _scales(self, layer: str) -> torch.Tensor:
        """(rows, groups) scales of a layer of integers."""
        scales = self._raw(layer, self.scheme.scale).float()
        rows = self.layers[layer][0]
        return (scales.reshape(1).expand(rows) if scales.numel() == 1 else scales).reshape(rows, -1)

    def _rows(self, layer: str, rows: tuple[int, int]) -> torch.Tensor:
        try:
            return self._unpack(layer).rows(*rows).dequantize(torch.float32)
        except ValueError as bad:
            raise self._unfit(layer, bad) from bad

    def _unpack(self, layer: str) -> QuantizedWeight:
        """The last one is kept: its pieces are read one after another."""
        if self._last is None or self._last[0] != layer:
            self._last = None  # makes room
            self._last = (layer, self._unpack_whole(layer))
        return self._last[1]

    def _unpack_whole(self, layer: str) -> QuantizedWeight:
        scheme = self.scheme
        if scheme.kind == "float8":
            return self._unpack_float8(layer)
        scales_OG = self._scales(layer)
        values = self._raw(layer, self._name(layer).rpartition(".")[2])
        zeros = None if scheme.symmetric else self._raw(layer, "weight_zero_point")
        if scheme.kind == "int8":
            return unpack_int8(values, zeros, scales_OG, group_size=scheme.group)
        order = f"{layer}.weight_g_idx"
        ordered = scheme.act_order and order in self._checkpoint.names
        index_K = self._checkpoint.read_raw(order) if ordered else None
        inputs = self.layers[layer][1]
        return unpack_compressed(
            values, zeros, scales_OG, index_K, scheme.bits, inputs, group_size=scheme.group
        )

    @property
    def _group(self) -> int:
        """Inputs that share a scale; 0: a whole row."""
        return self.scheme.group if self.scheme.block is None else self.scheme.block[1]

    def _unpack_float8(self, layer: str) -> QuantizedWeight:
        values, rows = self._raw(layer, "weight"), self.layers[layer][0]
        scales = self._raw(layer, self.scheme.scale).float()
        if self.scheme.block is not None:
            height = self.scheme.block[0]
            scales = scales.view(-(-rows // height), -1).repeat_interleave(height, 0)[:rows]
        elif self.scheme.one_scale:
            scales = scales.reshape(1).expand(rows)
        if not (torch.isfinite(values.float().sum()) and torch.isfinite(scales.sum())):
            raise ValueError("it holds values that are not finite")
        return QuantizedWeight(values, scales.reshape(rows, -1), 8, self._group)

    def _float8(self, layer: str, part: tuple[int, int]) -> torch.Tensor:
        rows, columns = self.layers[layer]
        begin, end = part
        weight = self._raw(layer, "weight")[begin:end].float()
        scales = self._raw(layer, self.scheme.scale).float()
        if self.scheme.block is not None:
            height, width = self.scheme.block
            scales = scales.view(-(-rows // height), -(-columns // width))
            scales = scales[torch.arange(begin, end) // height]
            return weight * scales.repeat_interleave(width, 1)[:, :columns]
        if self.scheme.one_scale:
            return weight * scales.reshape(())
        scales = scales.view(rows, -1)[begin:end]
        return weight * scales.repeat_interleave(self.scheme.group or columns, 1)[:, :columns]

    def _unfit(self, layer: str, cause: object) -> ModelError:
        shard = self._checkpoint.file_of(self._name(layer))
        return ModelError(f"{shard}: layer {layer}: {cause}")
