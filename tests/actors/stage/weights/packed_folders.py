"""GPTQ and AWQ folders made from the tiny models, beside the dense model they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests import tiny_models
from tests.actors.stage.weights.linears import linears, others

GROUP = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which output each of a word's eight nibbles holds

METHODS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP},
    "gptq-8": {"quant_method": "gptq", "bits": 8, "group_size": GROUP},
    "gptq-v2": {
        "quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2",
    },
    "gptq-act-order": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
}  # fmt: skip


def write(
    folder: Path, method: str, variant: str = "llama", group: int = GROUP
) -> transformers.PreTrainedModel:
    """Write the folder; returns the float32 model of the same, rounded weights."""
    config = {**METHODS[method], "group_size": group}
    model = tiny_models.build(variant)
    generator = torch.Generator().manual_seed(11)
    tensors = others(model)
    for stem, weight_OK in linears(model):
        group_of_K = torch.arange(weight_OK.shape[1]) // group
        if config.get("desc_act"):
            group_of_K = group_of_K[torch.randperm(len(group_of_K), generator=generator)]
        parts, dense = _quantize(weight_OK, group_of_K, config)
        tensors |= {f"{stem}.{part}": tensor for part, tensor in parts.items()}
        if config["quant_method"] == "gptq" and f"{stem}.bias" not in dict(
            model.named_parameters()
        ):
            tensors[f"{stem}.bias"] = torch.zeros(weight_OK.shape[0])
        weight_OK.copy_(dense)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()},
              folder / "model.safetensors")  # fmt: skip
    described = {
        **model.config.to_dict(),
        "architectures": [type(model).__name__],
        "quantization_config": config,
    }
    (folder / "config.json").write_text(json.dumps(described))
    return model


def _quantize(
    weight_OK: torch.Tensor, group_of_K: torch.Tensor, config: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The stored tensors, and the weight they stand for."""
    bits, highest = config["bits"], (1 << config["bits"]) - 1
    num_groups = int(group_of_K.max()) + 1
    scales_GO = torch.empty(num_groups, weight_OK.shape[0])
    zeros_GO = torch.empty_like(scales_GO)
    for g in range(num_groups):
        part_OK = weight_OK[:, group_of_K == g]
        low_O, high_O = part_OK.amin(1).clamp(max=-1e-3), part_OK.amax(1).clamp(min=1e-3)
        scales_GO[g] = ((high_O - low_O) / highest).half().float()
        zeros_GO[g] = (-low_O / scales_GO[g]).round().clamp(1, highest)
    scales_KO, zeros_KO = scales_GO[group_of_K], zeros_GO[group_of_K]
    values_KO = (weight_OK.T / scales_KO + zeros_KO).round().clamp(0, highest)
    dense_OK = (scales_KO * (values_KO - zeros_KO)).T.contiguous()
    parts = {"scales": scales_GO.half()}
    if config["quant_method"] == "awq":
        width = weight_OK.shape[0]
        order = (torch.arange(0, width, 8)[:, None] + torch.tensor(_AWQ_ORDER)).flatten()
        parts["qweight"] = _pack(values_KO[:, order].long(), bits)
        parts["qzeros"] = _pack(zeros_GO[:, order].long(), bits)
        return parts, dense_OK
    less = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
    parts["qweight"] = _pack(values_KO.T.long(), bits).T
    parts["qzeros"] = _pack(zeros_GO.long() - less, bits)
    parts["g_idx"] = group_of_K.to(torch.int32)
    return parts, dense_OK


def _pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """(N, W) numbers of `bits` bits, low bits first, as (N, W * bits / 32) int32 words."""
    per_word = 32 // bits
    grouped = values.view(values.shape[0], -1, per_word)
    words = (grouped << (torch.arange(per_word) * bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def count_calls(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> list[int]:
    """One entry for each call of the function, which does what it did."""
    calls, function = [], getattr(module, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls))
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, counted)
    return calls
