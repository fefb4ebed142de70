"""Describes a model folder and checks that it would load, from its config and file headers."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from actors.stage.models.read import FAMILIES, load_config
from actors.stage.models.split import split
from actors.stage.spec import StageSpec
from actors.stage.weights.folder import open_folder
from actors.stage.weights.gguf_config import GGUF_FAMILIES
from actors.stage.weights.names import all_shapes
from actors.stage.weights.schemes import COMPRESSED, FLOAT8, FORMATS
from kernels.ggml_blocks import BLOCK_TYPES


def families() -> dict[str, str]:
    """Architecture name -> what is special about it, in a line."""
    return {
        name: " ".join((family.describe.__doc__ or "").split()) for name, family in FAMILIES.items()
    }


def formats() -> dict[str, str]:
    """Weight formats -> the supported variants."""
    blocks = ", ".join(kind.name for kind in BLOCK_TYPES.values())
    return {
        "safetensors": "float32, float16, bfloat16, single or sharded",
        "gptq": "4 and 8 bits",
        "awq": "4 bits, version gemm",
        COMPRESSED: f"{', '.join(FORMATS)}, with one scheme for all layers",
        FLOAT8: "e4m3 with one scale, or one a block",
        "mxfp4": "experts of gpt-oss",
        "gguf": f"{blocks}; architectures {', '.join(GGUF_FAMILIES)}",
    }


def check_folder(folder: Path, tensor_ranks: int = 1, num_stages: int = 1) -> str:
    """One line about the model. Raises ModelError, naming file and cause, for one that would not
    load, or not be split so."""
    config = load_config(folder)
    spec = StageSpec(str(folder), tensor_ranks=tensor_ranks, num_stages=num_stages)
    split(config, spec)
    with open_folder(folder, config, spec, torch.float32):
        pass  # opening checks the tensors' names and shapes
    shapes = all_shapes(config)
    if config.tied_embeddings:
        del shapes[f"{config.names.head}.weight"]
    millions = sum(map(math.prod, shapes.values())) / 1e6
    stored = config.quantization_config or {}
    kind = stored.get("quant_method") or config.dtype
    if form := stored.get("types") or stored.get("format"):
        kind = f"{kind} ({form})"
    return (
        f"{config.architecture}, {config.num_layers} layers, {millions:,.1f} M parameters, {kind}, "
        f"up to {config.max_model_len} tokens"
    )
