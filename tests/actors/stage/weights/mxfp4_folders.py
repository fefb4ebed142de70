"""Folders of gpt-oss as it is published, made from the tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from tests import tiny_models

_SIZES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _pack(weight_EOK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks, scales, and the numbers that they stand for."""
    groups = weight_EOK.unflatten(-1, (-1, 32))
    exponents = torch.floor(torch.log2(groups.abs().amax(-1, keepdim=True) / 4))
    scaled = groups / 2**exponents
    codes = (scaled.abs()[..., None] - _SIZES).abs().argmin(-1)
    dense = (_SIZES[codes] * scaled.sign() * 2**exponents).flatten(-2)
    codes += 8 * (scaled < 0)
    blocks = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    return blocks, (exponents[..., 0] + 127).to(torch.uint8), dense


def write(folder: Path, **config: Any) -> transformers.PreTrainedModel:
    """Write the folder as gpt-oss is published; returns the float32 model of the same weights."""
    model = tiny_models.build("gpt-oss")
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = parameter.detach().clone()
            continue
        blocks, scales, dense = _pack(parameter.detach().mT)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        parameter.data.copy_(dense.mT)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    described = {
        **model.config.to_dict(),
        "architectures": [type(model).__name__],
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
        },
        **config,
    }
    (folder / "config.json").write_text(json.dumps(described))
    return model
