"""Folders that keep all experts of a layer in one tensor (gpt-oss, Granite's), read expert by
expert.

Experts in mxfp4 are stored as (expert, out, in), in blocks with scales, and are converted to the
serving type.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import torch

from actors.stage.models.config import DecoderConfig, ModelError
from actors.stage.models.names import Names, StackedNames
from actors.stage.weights.checkpoint import Checkpoint
from actors.stage.weights.source import WHOLE, Shard, cut
from kernels.mxfp4 import GROUP, unpack_mxfp4

_KNOWN = {"quant_method", "modules_to_not_convert", "dequantize"}


def stacked_shapes(config: DecoderConfig, names: StackedNames) -> dict[str, tuple[int, ...]]:
    """Tensors of one layer's experts as stored in float folders, named without the layer."""
    number, hidden, inner = config.num_experts, config.hidden_size, config.expert_size
    shapes: dict[str, tuple[int, ...]] = {}
    for name, outputs, inputs in ((names.gate_up, 2 * inner, hidden), (names.down, hidden, inner)):
        sides = (inputs, outputs) if names.as_inputs else (outputs, inputs)
        shapes[name] = (number, *sides)
        if config.expert_bias:
            shapes[f"{name}_bias"] = (number, outputs)
    return shapes


class StackedExperts:
    """A `WeightSource` that presents each expert's gate, up and down projection separately.

    config: `quantization_config` of config.json. Raises ModelError for an unknown key, or where
    nothing is quantized, ValueError for names of a family that does not stack its experts.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: Names,
        config: Mapping[str, Any] | None,
        dtype: torch.dtype,
    ):
        if names.stacked is None:
            raise ValueError("the family's experts are not stacked")
        for key, value in (config or {}).items():
            if key not in _KNOWN and value:
                where = f"{checkpoint.folder / 'config.json'}: quantization_config"
                raise ModelError(f"{where}: {key} is not supported (it is {str(value)[:80]})")
        has_blocks = any(name.endswith("_blocks") for name in checkpoint.names)
        if config and not has_blocks and not config.get("dequantize"):
            file, method = checkpoint.folder / "config.json", config.get("quant_method")
            raise ModelError(f"{file} says {method}, but no expert is quantized")
        self._checkpoint = checkpoint
        self._stacked = names.stacked
        expert = re.escape(names.expert).replace(r"\{\}", r"(\d+)")
        parts = "|".join(map(re.escape, (*names.expert_inputs, names.expert_down)))
        self._name = re.compile(rf"(.+\.){expert}({parts})\.(weight|bias)")
        self._up, self._down = names.expert_up, names.expert_down
        self._dtype = dtype

    def stored(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The shapes as stored in this folder: blocks and scales in place of tensors in mxfp4.
        Raises ModelError if an input width is no multiple of a block."""
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in shapes.items():
            if f"{name}_blocks" not in self._checkpoint.names:
                found[name] = shape
                continue
            number, inputs, outputs = shape
            if inputs % GROUP:
                shard = self._checkpoint.file_of(f"{name}_blocks")
                raise ModelError(f"{shard}: {name}: {inputs} inputs are not a multiple of {GROUP}")
            found[f"{name}_blocks"] = (number, outputs, inputs // GROUP, GROUP // 2)
            found[f"{name}_scales"] = (number, outputs, inputs // GROUP)
        return found

    def stores(self, name: str) -> bool:
        return self._checkpoint.stores(name)

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        part: Shard = WHOLE,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        match = self._name.fullmatch(name)
        if match is None:
            return self._checkpoint.read(name, shape, part, dtype)
        layer, number, projection, kind = match.groups()
        is_down = projection == self._down
        place = layer + (self._stacked.down if is_down else self._stacked.gate_up)
        if kind == "bias":
            place += "_bias"
        whole = self._expert(place, int(number))
        if not is_down:
            whole = self._half(whole, projection == self._up)
        if tuple(whole.shape) != shape:
            shard = self._checkpoint.file_of(place)
            raise ModelError(f"{shard}: {name} is {tuple(whole.shape)}, the config says {shape}")
        return cut(whole, part).to(dtype or self._dtype).contiguous()

    def _half(self, gate_up: torch.Tensor, is_up: bool) -> torch.Tensor:
        if self._stacked.alternates:
            return gate_up[is_up::2]
        return gate_up.chunk(2)[is_up]

    @functools.lru_cache(maxsize=1)  # noqa: B019 - lives only while loading; gate, then up
    def _expert(self, name: str, number: int) -> torch.Tensor:
        """(out, in) features of one expert, or its bias."""
        checkpoint, blocks = self._checkpoint, f"{name}_blocks"
        if blocks in checkpoint.names:
            raw = checkpoint.read_raw(blocks, number), checkpoint.read_raw(f"{name}_scales", number)
            try:
                return unpack_mxfp4(*raw)
            except ValueError as bad:
                raise ModelError(f"{checkpoint.file_of(blocks)}: {name}: {bad}") from bad
        shape, rows = checkpoint.shape_of(name), Shard(rows=(number, number + 1))
        tensor = checkpoint.read(name, shape, rows)[0]
        return tensor.T if tensor.dim() == 2 and self._stacked.as_inputs else tensor
