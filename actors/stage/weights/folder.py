"""Opening a model folder: chooses the source of its weights and checks it before reading."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from actors.stage.models.config import GGUF_LINK, DecoderConfig, ModelError
from actors.stage.spec import StageSpec
from actors.stage.weights.checkpoint import Checkpoint
from actors.stage.weights.gguf_weights import GgufWeights
from actors.stage.weights.mixer_names import Shapes
from actors.stage.weights.names import all_shapes
from actors.stage.weights.quantized import PACKED_ENDINGS, PackedLayers
from actors.stage.weights.scaled import SCALED_ENDINGS, ScaledWeights
from actors.stage.weights.schemes import COMPRESSED, FLOAT8, read_scheme
from actors.stage.weights.source import CPU, DummySource, PackedSource, WeightSource
from actors.stage.weights.stacked import StackedExperts
from kernels.quantized import FLOAT8_ROUNDING

_log = logging.getLogger(__name__)

LOAD_FORMATS = ("auto", "dummy")
# Buffers in old checkpoints; computed from the config instead.
IGNORED_ENDINGS: tuple[str, ...] = (
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
    "masked_bias",
    "attn.bias",
    "attention.bias",
)


@contextlib.contextmanager
def open_folder(
    folder: Path,
    config: DecoderConfig,
    spec: StageSpec,
    dtype: torch.dtype,
    device: torch.device = CPU,
) -> Iterator[tuple[WeightSource, PackedSource | None]]:
    """The folder's tensors, and its quantized layers if it has any; closed on exit.

    device: where weights are wanted; those that need nothing else done are read to it.

    Raises ModelError naming the file for weights that are missing, broken or of another model.
    """
    if spec.load_format not in LOAD_FORMATS:
        known = ", ".join(LOAD_FORMATS)
        raise ModelError(f"load_format {spec.load_format!r} is unknown; known: {known}")
    if spec.load_format == "dummy":
        _log.warning("weights of %s are random (load_format dummy)", folder)
        yield DummySource(spec.seed, dtype, device), None
        return
    if (config.quantization_config or {}).get("quant_method") == "gguf":
        with contextlib.closing(
            GgufWeights(folder / GGUF_LINK, config, dtype, spec.tensor_ranks)
        ) as weights:
            yield weights, weights.packed if weights.has_packed else None
        return
    is_plain = config.quantization_config is None and config.names.stacked is None
    checkpoint = Checkpoint(
        folder,
        dtype,
        config.names.optional_prefix,
        config.names.head,
        device=device if is_plain else CPU,
        prefixes=config.names.stored_prefixes,
    )
    config = _as_stored(config, checkpoint)
    try:
        shapes, ignored = all_shapes(config), IGNORED_ENDINGS
        head, embedding = f"{config.names.head}.weight", f"{config.names.embedding}.weight"
        optional = {head} if config.tied_embeddings else set()
        # Of two names of one tensor, safetensors keeps the first by the alphabet.
        if optional and checkpoint.stores(head) and not checkpoint.stores(embedding):
            checkpoint.rename(head, embedding)
        packed = None
        if config.names.stacked is not None:
            experts = StackedExperts(checkpoint, config.names, config.quantization_config, dtype)
            checkpoint.check(experts.stored(shapes), optional, ignored)
            yield experts, None
            return
        if (config.quantization_config or {}).get("quant_method") in (COMPRESSED, FLOAT8):
            yield _open_scaled(checkpoint, config, spec, dtype, shapes, optional)
            return
        if config.quantization_config is not None:
            packed = PackedLayers(checkpoint, config.quantization_config)
            layers = packed.among(name.removesuffix(".weight") for name in shapes)
            if not layers:
                method = config.quantization_config["quant_method"]
                raise ModelError(
                    f"{folder / 'config.json'} says {method}, but no layer is quantized"
                )
            for layer in layers:
                shape = shapes.pop(f"{layer}.weight")
                turned = config.names.transposed and layer != config.names.head
                packed.check(layer, shape[::-1] if turned else shape)
            # GPTQ and AWQ tools store biases of zeros with every layer.
            ignored = (*ignored, *PACKED_ENDINGS, *(f"{layer}.bias" for layer in layers))
        checkpoint.check(shapes, optional, ignored)
        yield checkpoint, packed
    finally:
        checkpoint.close()


def _as_stored(config: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    """Tools that quantize store the experts of such families apart."""
    stacked = config.names.stacked
    if stacked is None or any(stacked.gate_up in name for name in checkpoint.names):
        return config
    return replace(config, names=replace(config.names, stacked=None))


def _open_scaled(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    spec: StageSpec,
    dtype: torch.dtype,
    shapes: Shapes,
    optional: set[str],
) -> tuple[WeightSource, PackedSource]:
    stored = config.quantization_config or {}
    file = checkpoint.folder / "config.json"
    scheme = read_scheme(stored, f"{file}: {config.quantization_key}")
    if config.names.transposed:  # no tool writes one, and rows would be taken for columns
        method = stored["quant_method"]
        raise ModelError(f"{file}: {method} folders of {config.architecture} are not supported")
    weights = ScaledWeights(checkpoint, scheme, shapes, dtype, spec.tensor_ranks, spec.quantization)
    if not weights.layers:
        raise ModelError(f"{file} says {stored['quant_method']}, but no layer is quantized")
    if weights.scheme.kind == "packed":  # the other kinds keep the weight's name
        layers = weights.layers
        shapes = {n: s for n, s in shapes.items() if n.removesuffix(".weight") not in layers}
    checkpoint.check(shapes, optional, (*IGNORED_ENDINGS, *SCALED_ENDINGS))
    if weights.scheme.rounds_activations and weights.input_rounding == "none":
        rounding = FLOAT8_ROUNDING if weights.scheme.kind == "float8" else "w8a8"
        _log.warning(
            "%s was made for rounded activations; here they keep their type, so results differ "
            "a little from its makers'%s", file,
            f" (`model.quantization: {rounding}` rounds them)"
            if weights.scheme.input_rounding != "none" else "",
        )  # fmt: skip
    return weights, weights.packed
