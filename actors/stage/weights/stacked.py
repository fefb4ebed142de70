"""Folders of gpt-oss: all experts of a layer in one tensor, read expert by expert.

Rows of gate and up alternate. Floats are stored as (expert, in, out) features; mxfp4 as
(expert, out, in), in blocks with scales, and is converted to the serving type.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import torch

from actors.stage.models.config import DecoderConfig, ModelError
from actors.stage.weights.checkpoint import Checkpoint
from actors.stage.weights.source import WHOLE, Shard, cut
from kernels.mxfp4 import GROUP, unpack_mxfp4

_EXPERT = re.compile(r"(.+\.)(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_KNOWN = {"quant_method", "modules_to_not_convert", "dequantize"}


def stacked_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of one layer's experts as stored in float folders, named without their prefix."""
    number, hidden, inner = config.num_experts, config.hidden_size, config.expert_size
    return {
        "gate_up_proj": (number, hidden, 2 * inner),
        "gate_up_proj_bias": (number, 2 * inner),
        "down_proj": (number, inner, hidden),
        "down_proj_bias": (number, hidden),
    }


class StackedExperts:
    """A `WeightSource` that presents each expert's gate, up and down projection separately.

    config: `quantization_config` of config.json, empty if there is none. Raises ModelError for an
    unknown key.
    """

    def __init__(self, checkpoint: Checkpoint, config: Mapping[str, Any], dtype: torch.dtype):
        for key, value in config.items():
            if key not in _KNOWN and value:
                where = f"{checkpoint.folder / 'config.json'}: quantization_config"
                raise ModelError(f"{where}: {key} is not supported (it is {str(value)[:80]})")
        self._checkpoint = checkpoint
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

    def read(self, name: str, shape: tuple[int, ...], part: Shard = WHOLE) -> torch.Tensor:
        match = _EXPERT.fullmatch(name)
        if match is None:
            return self._checkpoint.read(name, shape, part)
        stem, number, projection, kind = match.groups()
        fused = projection != "down"
        place = f"{stem}{'gate_up' if fused else 'down'}_proj{'_bias' if kind == 'bias' else ''}"
        whole = self._expert(place, int(number))
        if fused:
            whole = whole[projection == "up" :: 2]
        if tuple(whole.shape) != shape:
            shard = self._checkpoint.file_of(place)
            raise ModelError(f"{shard}: {name} is {tuple(whole.shape)}, the config says {shape}")
        return cut(whole, part).to(self._dtype).contiguous()

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
        return tensor.T if tensor.dim() == 2 else tensor
