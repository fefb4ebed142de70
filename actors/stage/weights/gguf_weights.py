"""The tensors of a GGUF file under the names of the same model as a folder.

Linear layers stay packed whose blocks are whole numbers with one float16 scale, which the kernels
hold exactly. All other formats are converted to the serving type as they are read.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from actors.stage.models.config import DecoderConfig, ModelError
from actors.stage.weights.gguf_families import family_of
from actors.stage.weights.gguf_file import GgufFile
from actors.stage.weights.gguf_places import Place, fits, places, unused
from actors.stage.weights.source import WHOLE, PackedView, Shard, cut
from kernels.ggml_blocks import BlockType, as_quantized, dequantize
from kernels.ggml_grids import Bytes
from kernels.quantized import QuantizedWeight

# Read with the config, not as weights.
_OF_THE_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_CHUNK_FEATURES = 1 << 22  # converted to floating point at a time


class GgufWeights:
    """A `WeightSource` and, where layers stay packed, a `PackedSource`. Close it.

    ranks: number of ranks that split input features; a layer whose blocks the split would cut is
    not packed. Raises ModelError naming the file if tensors are missing, unexpected or of another
    shape than in the config.
    """

    def __init__(
        self, path: Path, config: DecoderConfig, dtype: torch.dtype, ranks: int = 1
    ) -> None:
        self._file = GgufFile(path)
        self._dtype = dtype
        self._ranks = ranks
        self._config = config
        self._places: dict[str, Place] = {}
        try:
            self._check(path)
        except ModelError:
            self.close()
            raise
        self.packed = PackedView(self.is_packed, self.read_packed)

    @property
    def has_packed(self) -> bool:
        return any(self.is_packed(name.removesuffix(".weight")) for name in self._places)

    def stores(self, name: str) -> bool:
        return name in self._places

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        part: Shard = WHOLE,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        place, wanted = self._places[name], dtype or self._dtype
        # 1 + w, for one, has no room in half precision.
        read_as = wanted if place.undo is None else torch.float32
        if place.heads:
            out = cut(self._of_heads(place, read_as), part)
        elif len(shape) == 1:
            out = self._vector(place, read_as)
            out = out if part.rows is None else out[slice(*part.rows)]
        else:
            out = self._matrix(place, part.rows, part.columns, read_as)
            out = out.view(len(out), *shape[1:-1], out.shape[-1])
        if place.undo is not None:
            out = place.undo(out).to(wanted)
        if not torch.isfinite(out.sum(dtype=torch.float32)):
            raise ModelError(
                f"{self._file.path}: tensor {place.tensors[0]} holds values that are not finite"
            )
        return out.contiguous()

    def _of_heads(self, place: Place, dtype: torch.dtype) -> torch.Tensor:
        """Keys and values of each head, from the latents."""
        whole = []
        for tensor in place.tensors:
            stored = self._file.tensors[tensor]
            rows = self._converted(self._rows(tensor), stored.kind, place, None, dtype)
            whole.append(rows.view(stored.shape))
        keys, values = whole
        return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)

    def _vector(self, place: Place, dtype: torch.dtype) -> torch.Tensor:
        (tensor,) = place.tensors
        stored = self._file.tensors[tensor]
        if place.expert is None:
            raw = self._rows(tensor)
        else:
            raw = self._file.rows(tensor, place.expert, place.expert + 1)
        whole = torch.from_numpy(dequantize(raw, stored.kind)).flatten().to(dtype)
        return whole if place.rows is None else whole[place.rows]

    def is_packed(self, layer: str) -> bool:
        place = self._places.get(f"{layer}.weight")
        if place is None or place.tensors[0] in ("token_embd.weight", "output.weight"):
            return False  # the embedding is looked up; the head is quantized by its own rules
        kind = self._kind(place)
        if place.heads or kind is None or not kind.bits or len(place.shape) != 2:
            return False
        moves = place.columns is not None and place.order_of_blocks(kind.features) is None
        return not moves and not place.shape[1] % (kind.features * self._ranks)

    def read_packed(self, layer: str, part: Shard) -> QuantizedWeight:
        place = self._places[f"{layer}.weight"]
        raw, kind = self._raw(place, part.rows), self._kind(place)
        weight = None
        if kind is not None:
            if (order := place.order_of_blocks(kind.features)) is not None:
                raw = raw.reshape(len(raw), len(order), -1)[:, order.numpy()].reshape(len(raw), -1)
            weight = as_quantized(raw, kind)
        if weight is None:
            raise ModelError(f"{self._file.path}: layer {layer} is not stored as whole numbers")
        if part.columns is None:
            return weight
        try:
            return weight.columns(*part.columns)
        except ValueError as bad:
            raise ModelError(f"{self._file.path}: layer {layer}: {bad}") from bad

    def close(self) -> None:
        self._file.close()

    def _check(self, path: Path) -> None:
        config, files = self._config, self._file.tensors
        head = f"{config.names.head}.weight"
        for name, place in places(config, family_of(self._file), files).items():
            missing = next((tensor for tensor in place.tensors if tensor not in files), None)
            if missing is not None:
                if name == head and config.tied_embeddings:
                    continue
                raise ModelError(f"tensor {missing} is missing from {path}")
            found = [files[tensor].shape for tensor in place.tensors]
            height = sum(math.prod(shape[:-1]) for shape in found)
            for tensor, shape in zip(place.tensors, found, strict=True):
                if not fits(shape, place, config.num_experts, height):
                    raise ModelError(
                        f"{path}: tensor {tensor} has shape {shape}, the config says "
                        f"{place.wanted(config.num_experts)}"
                    )
            self._places[name] = place
        known = unused(config) | {
            tensor for place in self._places.values() for tensor in place.tensors
        }
        layers = 1 + max(int(tensor.split(".")[1]) for tensor in known if tensor[:4] == "blk.")
        architecture = self._file.metadata["general.architecture"]
        written = int(self._file.metadata[f"{architecture}.block_count"])
        for tensor in files:
            # Layers behind the model's predict further tokens.
            further = tensor[:4] == "blk." and layers <= int(tensor.split(".")[1]) < written
            if tensor not in known and tensor not in _OF_THE_CONFIG and not further:
                raise ModelError(f"{path}: unexpected tensor {tensor}; the model has none such")

    def _kind(self, place: Place) -> BlockType | None:
        """Of all its tensors; None where they are of several."""
        kinds = {self._file.tensors[tensor].kind for tensor in place.tensors}
        return kinds.pop() if len(kinds) == 1 else None

    def _matrix(
        self,
        place: Place,
        rows: tuple[int, int] | None,
        columns: tuple[int, int] | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        if (kind := self._kind(place)) is not None:
            raw = self._raw(place, rows)
            return self._converted(raw, kind, place, columns, dtype)
        whole = torch.cat(
            [
                self._converted(
                    self._rows(tensor), self._file.tensors[tensor].kind, place, columns, dtype
                )
                for tensor in place.tensors
            ]
        )
        begin, end = rows or (0, len(whole))
        return whole[begin:end] if place.rows is None else whole[place.rows[begin:end]]

    def _converted(
        self,
        raw: Bytes,
        kind: BlockType,
        place: Place,
        columns: tuple[int, int] | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Rows of this type, in chunks, because intermediate values take more memory."""
        features = raw.shape[1] // kind.num_bytes * kind.features
        step, chunks = max(1, _CHUNK_FEATURES // features), []
        for begin in range(0, len(raw), step):
            wide = torch.from_numpy(dequantize(raw[begin : begin + step], kind))
            if place.columns is not None:
                wide = wide[:, place.columns]
            chunks.append(
                (wide if columns is None else wide[:, slice(*columns)]).to(dtype, copy=True)
            )
        return torch.cat(chunks) if chunks else torch.empty(0, features, dtype=dtype)

    def _rows(self, tensor: str) -> Bytes:
        return self._file.rows(tensor, 0, math.prod(self._file.tensors[tensor].shape[:-1]))

    def _raw(self, place: Place, rows: tuple[int, int] | None) -> Bytes:
        """Rows of a matrix as stored, in the order of a folder."""
        if len(place.tensors) > 1:
            whole = np.concatenate([self._rows(tensor) for tensor in place.tensors])
            begin, end = rows or (0, len(whole))
            return whole[begin:end] if place.rows is None else whole[place.rows[begin:end].numpy()]
        (tensor,) = place.tensors
        shape = self._file.tensors[tensor].shape
        height = shape[-2] if place.expert is not None else math.prod(shape[:-1])
        first = (place.expert or 0) * height
        begin, end = rows or (0, place.shape[0])
        if place.rows is None:
            return self._file.rows(tensor, first + begin, first + end)
        return self._file.rows(tensor, first, first + height)[place.rows[begin:end].numpy()]
