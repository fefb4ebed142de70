"""The layers of a tiny model that tools quantize, as published folders name them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

_MIXERS = tuple(f"in_proj_{part}.weight" for part in ("qkvz", "qkv", "z", "ba", "b", "a"))
_LINEARS = ("_proj.weight", "_proj_with_mqa.weight", *_MIXERS)
_GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def linears(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Name without `.weight`, and (out, in) as a view of the model's weights. All experts of a
    layer are one tensor in transformers, and three for each on disk."""
    for name, parameter in model.named_parameters():
        if name.endswith(_LINEARS):
            yield name.removesuffix(".weight"), parameter.data
        elif name.endswith((_GATE_UP, _DOWN)):
            experts, _, part = name.rpartition(".")
            for number, weight_OK in enumerate(parameter.data):
                halves = weight_OK.chunk(2) if part == "gate_up_proj" else (weight_OK,)
                names = ("gate_proj", "up_proj") if len(halves) == 2 else ("down_proj",)
                for each, half_OK in zip(names, halves, strict=True):
                    yield f"{experts}.{number}.{each}", half_OK


def others(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Copies of all other tensors, by name."""
    stored = model.state_dict()
    return {
        name: tensor.detach().clone()
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if name in stored and not name.endswith((*_LINEARS, _GATE_UP, _DOWN))
    }
