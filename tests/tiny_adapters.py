"""LoRA adapters of the tiny models, saved by peft, and what it answers with them merged."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from tests import tiny_models
from tests.actors.stage.greedy_reference import greedy_of, make_prompts

LLAMA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write(
    folder: Path,
    variant: str = "llama",
    seed: int = 1,
    model: Mapping[str, Any] = MappingProxyType({}),
    **config: Any,
) -> Path:
    """An adapter of weights wide enough to change what the model says. model: overrides, as of
    `tiny_models.build`. config: of `LoraConfig`, by default all linear layers at rank 4."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": list(LLAMA_MODULES), **config}
    base = tiny_models.build(variant, **model)
    adapted = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(adapted.named_parameters()):
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.15)
    adapted.save_pretrained(folder)
    return folder


@functools.cache
def expected(folder: Path, variant: str = "llama", **overrides: Any) -> list[list[int]]:
    """What transformers generates with the adapter merged into the weights by peft."""
    model: Any = PeftModel.from_pretrained(tiny_models.build(variant, **overrides), str(folder))
    return greedy_of(variant, model.merge_and_unload(), make_prompts())
