"""Folders of compressed-tensors and float8 made from the tiny models, beside the dense model that
they stand for. Layouts as the compressed-tensors package and DeepSeek's checkpoints have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from tests import tiny_models
from tests.actors.stage.weights.linears import linears, others

GROUP = 32
BLOCK = 48  # cuts no tensor of the tiny models evenly
DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}

FLOAT_TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": True}


def compressed(form: str, activations: Any = None, **weights: Any) -> dict[str, Any]:
    kind = "float" if form == "float-quantized" else "int"
    given = {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": given, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


GROUPS = {"strategy": "group", "group_size": GROUP}
METHODS: dict[str, dict[str, Any]] = {
    "w4a16": compressed("pack-quantized", num_bits=4, **GROUPS),
    "w4a16-asymmetric": compressed("pack-quantized", num_bits=4, symmetric=False, **GROUPS),
    "w4a16-act-order": compressed("pack-quantized", num_bits=4, actorder="group", **GROUPS),
    "w8a16-channel": compressed("pack-quantized", strategy="channel"),
    "w8a8": compressed("int-quantized", DYNAMIC, strategy="channel"),
    "w8a8-tensor": compressed("int-quantized", DYNAMIC, strategy="tensor"),
    "w8-tensor-asymmetric": compressed("int-quantized", strategy="tensor", symmetric=False),
    "w8-groups-asymmetric": compressed("int-quantized", symmetric=False, **GROUPS),
    "fp8-channel": compressed("float-quantized", DYNAMIC | {"type": "float"}, strategy="channel"),
    "fp8-tensor": compressed("float-quantized", FLOAT_TENSOR, strategy="tensor"),
    "fp8-block": compressed(
        "float-quantized", FLOAT_TENSOR | {"strategy": "group", "group_size": BLOCK},
        strategy="block", block_structure=[BLOCK, BLOCK],
    ),
    "deepseek": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    },
    "mistral": {
        "quant_method": "fp8", "activation_scheme": "static", "dequantize": True,
        "weight_block_size": None,
    },
}  # fmt: skip


def write(folder: Path, method: str, variant: str = "llama") -> transformers.PreTrainedModel:
    """Write the folder; returns the float32 model of the same, rounded weights."""
    config = METHODS[method]
    model = tiny_models.build(variant)
    generator = torch.Generator().manual_seed(11)
    tensors = others(model)
    for stem, weight_OK in linears(model):
        parts, dense = _quantize(weight_OK, config, generator)
        tensors |= {f"{stem}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        weight_OK.copy_(dense)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    described = {
        **model.config.to_dict(),
        "architectures": [type(model).__name__],
        "quantization_config": config,
    }
    (folder / "config.json").write_text(json.dumps(described))
    return model


def _quantize(
    weight_OK: torch.Tensor, config: dict[str, Any], generator: torch.Generator
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The stored tensors, and the weight they stand for."""
    if config["quant_method"] == "fp8":
        if config["weight_block_size"] is not None:
            return _float8(weight_OK, "weight_scale_inv", {"strategy": "block"})
        parts, dense = _float8(weight_OK, "weight_scale_inv", {"strategy": "tensor"})
        parts["weight_scale_inv"] = parts["weight_scale_inv"].reshape(())
        return parts | {"activation_scale": torch.tensor(0.5)}, dense
    scheme = config["config_groups"]["group_0"]["weights"]
    if config["format"] == "float-quantized":
        return _float8(weight_OK, "weight_scale", scheme)
    rows, columns = weight_OK.shape
    bits, size = scheme["num_bits"], scheme.get("group_size") or columns
    highest = (1 << (bits - 1)) - 1
    group_of_K = torch.arange(columns) // size
    parts: dict[str, torch.Tensor] = {}
    if scheme.get("actorder") == "group":
        group_of_K = group_of_K[torch.randperm(columns, generator=generator)]
        parts["weight_g_idx"] = group_of_K.to(torch.int32)
    num_groups = int(group_of_K.max()) + 1
    largest_OG = torch.stack(
        [weight_OK[:, group_of_K == g].abs().amax(1) for g in range(num_groups)], 1
    )
    if scheme["strategy"] == "tensor":
        largest_OG = largest_OG.amax().expand(rows, 1)
    scales_OG = (largest_OG / highest).half().float()
    zeros_OG = torch.zeros_like(scales_OG)
    is_one = scheme["strategy"] == "tensor"
    if not scheme["symmetric"]:
        shape = (1, 1) if is_one else zeros_OG.shape
        zeros_OG = torch.randint(-2, 3, shape, generator=generator).float().expand_as(zeros_OG)
    scales_OK, zeros_OK = scales_OG[:, group_of_K], zeros_OG[:, group_of_K]
    values_OK = (weight_OK / scales_OK + zeros_OK).round().clamp(-highest - 1, highest)
    dense = scales_OK * (values_OK - zeros_OK)
    parts["weight_scale"] = scales_OG[:1, 0] if is_one else scales_OG
    if config["format"] == "int-quantized":
        parts["weight"] = values_OK.to(torch.int8)
        if not scheme["symmetric"]:
            parts["weight_zero_point"] = (zeros_OG[:1, 0] if is_one else zeros_OG).to(torch.int8)
        return parts, dense
    parts["weight_packed"] = _pack(values_OK, bits)
    parts["weight_shape"] = torch.tensor([rows, columns])
    if not scheme["symmetric"]:
        parts["weight_zero_point"] = _pack(zeros_OG.T, bits).T
    return parts, dense


def _float8(
    weight_OK: torch.Tensor, scale: str, scheme: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    rows, columns = weight_OK.shape
    strategy = scheme["strategy"]
    height, width = {"tensor": (rows, columns), "channel": (1, columns)}.get(
        strategy, (BLOCK, BLOCK)
    )
    scales = torch.empty(-(-rows // height), -(-columns // width))
    dense, values = torch.empty_like(weight_OK), torch.empty_like(weight_OK)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
            scales[i, j] = weight_OK[place].abs().amax() / 448
            values[place] = (weight_OK[place] / scales[i, j]).to(torch.float8_e4m3fn).float()
            dense[place] = values[place] * scales[i, j]
    stored = scales.flatten() if strategy == "tensor" else scales
    return {"weight": values.to(torch.float8_e4m3fn), scale: stored}, dense


def _pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """(N, W) signed numbers, moved to begin at 0, low bits first, as (N, W * bits / 32) words."""
    moved = values.long() + (1 << (bits - 1))
    grouped = moved.view(moved.shape[0], -1, 32 // bits)
    words = (grouped << (torch.arange(32 // bits) * bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
