"""How a GGUF architecture maps to one of folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.stage.models.config import ModelError
from actors.stage.models.keys import JsonObject
from actors.stage.weights.gguf_metadata import GgufMetadata

# The norm before an MLP, where files call it as other families' after attention.
MLP_NORM = {"ffn_norm": "post_attention_norm"}

SOFTMAX, SIGMOID = 1, 2  # llama.cpp's numbers of the scores of experts


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """One architecture.

    extra: keys of config.json beyond the shared ones. permuted: rows of q and k are stored in pairs
    of neighbors, not in halves as in a folder; biases_permuted: those of their biases are, too.
    norms_plus_one: norms are stored as 1 + w, but for
    those of linear attention. renamed: tensors with other names than most files have.
    without_ending: tensors whose names have none. split_gate_up: gate and up are two tensors, where
    the folder has one. regrouped: so are what comes into linear attention and its gates, and not
    grouped by key head as there. latent: attention is, so that keys and values differ in length.
    """

    architecture: str
    model_type: str
    extra: Callable[[GgufMetadata, JsonObject], JsonObject] = field(
        default=lambda metadata, config: {}
    )
    permuted: bool = False
    biases_permuted: bool = True
    norms_plus_one: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    without_ending: tuple[str, ...] = ()
    split_gate_up: bool = False
    regrouped: bool = False
    latent: bool = False

    def called(self, stem: str) -> str:
        return self.renamed.get(stem, stem)

    def whole(self, stem: str, ending: str) -> str:
        return stem if stem in self.without_ending else f"{stem}.{ending}"

    def adds_one(self, name: str) -> bool:
        """Whether the folder's tensor of this name is stored as 1 + w."""
        is_norm = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
        return self.norms_plus_one and is_norm


def window(metadata: GgufMetadata) -> JsonObject:
    return {"sliding_window": metadata.get("attention.sliding_window") or None}


def of_layers(metadata: GgufMetadata, key: str) -> list[int]:
    """A number of each layer, which a file gives one by one or once."""
    value, layers = metadata.get(key, 0), metadata.number("block_count")
    given = value if isinstance(value, list) else [value] * layers
    if len(given) != layers or len(set(given) - {0}) > 1:
        raise ModelError(
            f"{metadata.file.path}: {metadata.architecture}.{key} {value} is not one number in "
            f"each of {layers} layers, or 0"
        )
    return given


def only(metadata: GgufMetadata, key: str, *values: Any) -> None:
    """Read a key that may have these values alone. Raises ModelError for another."""
    if (found := metadata.get(key, values[0])) not in values:
        raise ModelError(
            f"{metadata.file.path}: {metadata.architecture}.{key} is {found!r}; supported: "
            f"{', '.join(map(str, values))}"
        )


def partial_rotation(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    """Of whole heads, too: a family's default may be a part."""
    rotated = metadata.get("rope.dimension_count") or config["head_dim"]
    return {"partial_rotary_factor": rotated / config["head_dim"]}


def of_images(metadata: GgufMetadata, config: JsonObject) -> JsonObject:
    """The decoder of a model of images: for a text, its rotation is a plain one."""
    metadata.get("rope.dimension_sections")
    metadata.get("n_deepstack_layers")
    return {}
