"""Reading a LoRA adapter as peft saves it: adapter_config.json and adapter_model.safetensors.

A config key that would change results and is not supported is refused by name, and so is an
unknown key, unless it is empty.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from actors.stage.models.config import DecoderConfig, ModelError, read_json
from actors.stage.weights.attention_names import attending_linear_shapes
from actors.stage.weights.checkpoint import Checkpoint
from actors.stage.weights.names import layer_prefix, mlp_linear_shapes, mlp_prefix
from actors.stage.weights.source import Shard

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_BASE = "base_model.model."
_TENSOR = re.compile(re.escape(_BASE) + r"(?P<module>.+)\.lora_[AB]\.weight")

_READ = {"peft_type", "task_type", "r", "lora_alpha", "use_rslora", "bias", "init_lora_weights"}
# Keys of training, of the base model, or implied by the tensors. (Ranks that EVA has distributed
# are a rank_pattern, which is refused.)
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "target_modules",
}  # fmt: skip
# Initializations that leave the base model's weights unchanged.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """rank: rows of A. scaling: factor of the adapter's output."""

    rank: int
    scaling: float


def read_adapter_config(folder: Path, max_rank: int) -> AdapterConfig:
    """Raises ModelError naming the file and the key that cannot be served."""
    if not folder.is_dir():
        raise ModelError(f"adapter folder {folder} is missing")
    path = folder / _CONFIG
    keys = read_json(path)
    if keys.get("peft_type") != "LORA":
        raise ModelError(f"{path}: peft_type {keys.get('peft_type')!r} is not LORA")
    if keys.get("task_type") not in (None, "CAUSAL_LM"):
        raise ModelError(f"{path}: task_type {keys['task_type']!r} is not CAUSAL_LM")
    if keys.get("bias", "none") != "none":
        raise ModelError(f"{path}: bias {keys['bias']!r} is not supported; supported: none")
    start = keys.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise ModelError(
            f"{path}: init_lora_weights {start!r} changes the base model's weights; convert the "
            "adapter with peft's path_initial_model_for_weight_conversion"
        )
    for key, value in keys.items():
        if key not in _READ | _WITHOUT_EFFECT and value:
            raise ModelError(f"{path}: {key} is not supported (it is {str(value)[:80]})")
    rank = _number(path, keys, "r", 8)
    if rank != int(rank) or rank < 1:
        raise ModelError(f"{path}: r {rank:g} is not a rank")
    if rank > max_rank:
        raise ModelError(f"{path}: r {rank:g} is above adapters.max_rank, {max_rank}")
    divisor = math.sqrt(rank) if keys.get("use_rslora") else rank
    return AdapterConfig(int(rank), _number(path, keys, "lora_alpha", 8) / divisor)


def _number(path: Path, keys: Mapping[str, Any], key: str, default: float) -> float:
    value = keys.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelError(f"{path}: {key} {value!r} is not a number")
    return float(value)


class AdapterFolder:
    """One adapter, checked against the whole model; `modules`: layers that it changes. Close it."""

    def __init__(self, folder: Path, config: DecoderConfig, max_rank: int, dtype: torch.dtype):
        self.config = read_adapter_config(folder, max_rank)
        self._dtype = dtype
        self._shapes = _module_shapes(config)
        # float32, because weights are scaled before they are rounded to the model's type.
        self._checkpoint = Checkpoint(
            folder,
            torch.float32,
            single=_WEIGHTS,
            prefixes=tuple(
                (_BASE + stored, None if ours is None else _BASE + ours)
                for stored, ours in config.names.stored_prefixes
            ),
        )
        try:
            self.modules = frozenset(map(self._module_of, self._checkpoint.names))
            if not self.modules:
                raise ModelError(f"{folder / _WEIGHTS} holds no tensors")
            rank, shapes = self.config.rank, dict[str, tuple[int, ...]]()
            for module in self.modules:
                out_features, in_features = self._shapes[module]
                shapes[_tensor(module, "A")] = (rank, in_features)
                shapes[_tensor(module, "B")] = (out_features, rank)
            self._checkpoint.check(shapes)
        except ModelError:
            self.close()
            raise

    def _module_of(self, tensor: str) -> str:
        match = _TENSOR.fullmatch(tensor)
        if match is None or match["module"] not in self._shapes:
            raise ModelError(
                f"{self._checkpoint.file_of(tensor)}: tensor {tensor} belongs to no linear layer "
                "of the model that an adapter can change"
            )
        return match["module"]

    def down(self, module: str, part: Shard) -> torch.Tensor:
        """A as (rank, in)."""
        shape = (self.config.rank, self._shapes[module][1])
        return self._checkpoint.read(_tensor(module, "A"), shape, part).to(self._dtype)

    def up(
        self, module: str, part: Shard, order: torch.Tensor | None, factor: float
    ) -> torch.Tensor:
        """B times the scaling and a factor of the layer's results, as (out, rank); `order` as in
        `names.Piece`."""
        shape = (self._shapes[module][0], self.config.rank)
        up_OR = self._checkpoint.read(_tensor(module, "B"), shape, part)
        if order is not None:
            up_OR = up_OR[order]
        return (up_OR * (self.config.scaling * factor)).to(self._dtype)

    def close(self) -> None:
        self._checkpoint.close()


def _tensor(module: str, which: str) -> str:
    return f"{_BASE}{module}.lora_{which}.weight"


def _module_shapes(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """(out, in) features of every linear layer that an adapter may change: all but the head,
    routers and experts of mixtures, and what makes heads of latents."""
    latent = config.names.latent
    shapes: dict[str, tuple[int, int]] = {}
    for layer in range(config.num_layers):
        one, mixer = config.at(layer), config.has_mixer(layer)
        for name, (shape, _) in attending_linear_shapes(one, mixer).items():
            if config.latent is None or name not in (latent.query_up, latent.up):
                shapes[layer_prefix(config, layer) + name] = shape
        if config.has_mlp(layer) and not config.has_experts(layer):
            for name, (shape, _) in mlp_linear_shapes(one, experts=False).items():
                shapes[mlp_prefix(config, layer) + name] = shape
    return shapes
