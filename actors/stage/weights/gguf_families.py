"""All GGUF architectures that are read."""

from __future__ import annotations

from actors.stage.models.config import ModelError
from actors.stage.weights import (
    gguf_dense,
    gguf_gemma4,
    gguf_hybrids,
    gguf_latent,
    gguf_layer_norms,
    gguf_mixtures,
)
from actors.stage.weights.gguf_family import GgufFamily
from actors.stage.weights.gguf_file import GgufFile

GGUF_FAMILIES: dict[str, GgufFamily] = {
    **gguf_dense.FAMILIES,
    **gguf_layer_norms.FAMILIES,
    **gguf_gemma4.FAMILIES,
    **gguf_mixtures.FAMILIES,
    **gguf_latent.FAMILIES,
    **gguf_hybrids.FAMILIES,
}


def family_of(file: GgufFile) -> GgufFamily:
    """The file's family. Raises ModelError if the format does not support its architecture."""
    name = file.metadata.get("general.architecture")
    family = GGUF_FAMILIES.get(str(name))
    if family is None:
        raise ModelError(
            f"{file.path}: architecture {name!r} is not supported in a GGUF file; supported: "
            f"{', '.join(GGUF_FAMILIES)}"
        )
    return family
