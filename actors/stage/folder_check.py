"""Describes a model folder and checks that it would load, from its config and file headers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from actors.stage.models.config import DecoderConfig, ModelError
from actors.stage.models.read import FAMILIES, load_config
from actors.stage.models.split import split
from actors.stage.spec import StageSpec

# What imports torch is imported within functions: `check_description` runs before a server starts.


def families() -> dict[str, str]:
    """Architecture name -> what is special about it, in a line."""
    return {
        name: " ".join((family.describe.__doc__ or "").split()) for name, family in FAMILIES.items()
    }


def formats() -> dict[str, str]:
    """Weight formats -> the supported variants."""
    from actors.stage.weights.gguf_families import GGUF_FAMILIES
    from actors.stage.weights.schemes import COMPRESSED, FLOAT8, FORMATS
    from kernels.ggml_blocks import BLOCK_TYPES

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


def check_description(spec: StageSpec) -> None:
    """Raises ModelError, beginning with the setting at fault, for a config.json that is of no model
    here, or of one that cannot be split so. Leaves out what takes seconds: see `check_whole`."""
    _describe(spec, refuse_unknown=False)


def check_whole(spec: StageSpec, adapters: Iterable[tuple[str, Path]], *, on_cpu: bool) -> None:
    """Check what `check_description` does, and also unknown keys, the weights' names and shapes,
    and adapters, which are called by their names; where ranks compute on the CPU, also whether a
    backend does. Raises ValueError likewise."""
    import torch

    from actors.stage.loaded_model import choose_backend
    from actors.stage.weights.adapter_folder import read_adapter_config
    from actors.stage.weights.folder import open_folder

    config, draft_config = _describe(spec, refuse_unknown=True)
    if on_cpu:
        choose_backend(spec, config)
        if draft_config is not None:
            try:
                choose_backend(spec.of_draft_model(), draft_config)
            except ValueError as error:
                raise ModelError(f"speculation.model: {error}") from error
    each = [("model.path", spec, config, spec.hub_model)]
    if draft_config is not None:
        draft = spec.of_draft_model()
        each.append(("speculation.model", draft, draft_config, spec.hub_draft_model))
    for key, of, described, on_hub in each:
        if on_hub is not None:  # each rank downloads weights on its own node
            continue
        try:
            with open_folder(Path(of.model_path), described, of, torch.float32):
                pass
        except ModelError as error:
            raise ModelError(f"{key}: {error}") from error
    for name, folder in adapters:
        try:
            read_adapter_config(folder, spec.max_adapter_rank)
        except ModelError as error:
            raise ModelError(f"adapters.paths.{name}: {error}") from error


def _describe(spec: StageSpec, refuse_unknown: bool) -> tuple[DecoderConfig, DecoderConfig | None]:
    """Of the model and of the one that drafts for it, if there is one."""
    try:
        config = load_config(
            Path(spec.model_path), spec.ignored_config_keys, refuse_unknown=refuse_unknown
        )
    except ModelError as error:
        raise ModelError(f"model.path: {error}") from error
    try:
        split(config, spec)
    except ModelError as error:
        raise ModelError(f"parallel.tensor_ranks: {error}") from error
    if spec.draft_model_path is None:
        return config, None
    try:
        return config, load_config(Path(spec.draft_model_path), refuse_unknown=refuse_unknown)
    except ModelError as error:
        raise ModelError(f"speculation.model: {error}") from error


def check_config(
    folder: Path, tensor_ranks: int = 1, num_stages: int = 1
) -> tuple[DecoderConfig, StageSpec]:
    """What `check_folder` does without weights."""
    config = load_config(folder)
    spec = StageSpec(str(folder), tensor_ranks=tensor_ranks, num_stages=num_stages)
    split(config, spec)
    return config, spec


def check_folder(folder: Path, tensor_ranks: int = 1, num_stages: int = 1) -> str:
    """One line about the model. Raises ModelError, naming file and cause, for one that would not
    load, or not be split so."""
    import torch

    from actors.stage.weights.folder import open_folder
    from actors.stage.weights.names import all_shapes

    config, spec = check_config(folder, tensor_ranks, num_stages)
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
