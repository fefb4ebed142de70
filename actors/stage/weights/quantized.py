"""GPTQ and AWQ folders: integer weights read as stored and cut for a rank.

Each rank reads whole layers and keeps its part, because groups and input order complicate slicing
the file, and at four bits per weight a layer is small.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from actors.stage.models.config import ModelError
from actors.stage.weights.checkpoint import Checkpoint
from actors.stage.weights.source import Shard
from kernels.gptq_awq import unpack_awq, unpack_gptq
from kernels.quantized import QuantizedWeight

PACKED_ENDINGS = (".qweight", ".qzeros", ".scales", ".g_idx")


class PackedLayers:
    """The quantized linear layers of a folder, by name (without the ending)."""

    def __init__(self, checkpoint: Checkpoint, config: dict[str, Any]) -> None:
        """config: `quantization_config` of config.json. Raises ModelError for an unsupported
        format, naming the supported ones."""
        self._checkpoint = checkpoint
        self._method = config["quant_method"]
        self._bits = config.get("bits", 4)
        self._format = str(config.get("checkpoint_format", "gptq"))
        where = f"{checkpoint.folder / 'config.json'}: quantization_config"
        if self._method == "gptq":
            if self._bits not in (4, 8):
                raise ModelError(f"{where}: bits {self._bits} of GPTQ; supported: 4 and 8")
            if self._format not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
                raise ModelError(f"{where}: GPTQ format {self._format!r}; supported: gptq, gptq_v2")
        elif self._bits != 4 or str(config.get("version", "gemm")).lower() != "gemm":
            raise ModelError(f"{where}: AWQ other than 4 bits, version gemm")

    def __contains__(self, name: str) -> bool:
        return f"{name}.qweight" in self._checkpoint.names

    def has_bias(self, name: str) -> bool:
        return f"{name}.bias" in self._checkpoint.names

    def among(self, names: Iterable[str]) -> set[str]:
        """The named layers that are stored quantized."""
        return {name for name in names if name in self}

    def read(self, name: str, shape: tuple[int, ...], part: Shard) -> QuantizedWeight:
        """The part of layer `name`, whose whole weight must be `shape` (out, in features).

        Raises ModelError if its tensors do not fit, or a rank's part would cut a group.
        """
        shard = self._checkpoint.file_of(f"{name}.qweight")
        try:
            weight = self._unpack(name)
            found = tuple(weight.values_OK.shape)
            if found != shape:
                raise ModelError(f"{shard}: layer {name} is {found}, the config says {shape}")
            if part.rows is not None:
                weight = weight.rows(*part.rows)
            if part.columns is not None and part.columns != (0, shape[1]):
                weight = weight.columns(*part.columns)
        except ValueError as bad:
            if isinstance(bad, ModelError):
                raise
            raise ModelError(f"{shard}: layer {name}: {bad}") from bad
        return weight

    def _unpack(self, name: str) -> QuantizedWeight:
        raw = self._checkpoint.read_raw
        words, zeros = raw(f"{name}.qweight"), raw(f"{name}.qzeros")
        scales_GO = raw(f"{name}.scales")
        if self._method == "awq":
            return unpack_awq(words, zeros, scales_GO)
        order = f"{name}.g_idx"
        index_K = raw(order) if order in self._checkpoint.names else None
        return unpack_gptq(words, zeros, scales_GO, index_K, self._bits, self._format)
