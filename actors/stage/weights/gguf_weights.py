"""The tensors of a GGUF file under the names of the same model as a folder.

Q8_0 and Q4_0 linear layers stay packed, because the kernels support their blocks: groups of 32
with float16 scales. All other formats are converted to the serving type as they are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from actors.stage.models.config import DecoderConfig, ModelError
from actors.stage.models.names import Names
from actors.stage.weights.gguf_config import family_of
from actors.stage.weights.gguf_file import GgufFile, StoredTensor
from actors.stage.weights.names import all_shapes
from actors.stage.weights.source import WHOLE, PackedView, Shard
from kernels.ggml_blocks import PACKED, Bytes, as_quantized, dequantize
from kernels.quantized import QuantizedWeight

# Read with the config, not as weights.
_OF_THE_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_CHUNK_FEATURES = 1 << 22  # converted to floating point at a time
_Place = tuple[str, int | None]  # the tensor's name in the file, and the expert in it


class GgufWeights:
    """A `WeightSource` and, where layers are Q8_0 or Q4_0, a `PackedSource`. Close it.

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
        self._places: dict[str, _Place] = {}
        try:
            self._family = family_of(self._file)
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
        stored = self._stored(name)
        rows = part.rows if part.rows is not None and len(shape) > 1 else None
        is_raised = self._family.norms_plus_one and len(shape) == 1 and name.endswith(".weight")
        wanted = dtype or self._dtype
        read_as = torch.float32 if is_raised else wanted  # 1 + w has no room in half precision
        out = torch.cat(list(self._chunks(name, stored, rows, part.columns, read_as)))
        if len(shape) == 1:
            out = out.flatten()
            if (order := self._order(name)) is not None:
                out = out[order]
            if is_raised:
                out = (out - 1).to(wanted)
            if part.rows is not None:
                out = out[slice(*part.rows)]
        if not torch.isfinite(out.sum(dtype=torch.float32)):
            place = self._places[name][0]
            raise ModelError(f"{self._file.path}: tensor {place} holds values that are not finite")
        return out.contiguous()

    def is_packed(self, layer: str) -> bool:
        place = self._places.get(f"{layer}.weight")
        if place is None or place[0] in ("token_embd.weight", "output.weight"):
            return False  # the embedding is looked up; the head is quantized by its own rules
        stored = self._file.tensors[place[0]]
        return stored.kind.name in PACKED and not stored.shape[-1] % (
            stored.kind.features * self._ranks
        )

    def read_packed(self, layer: str, part: Shard) -> QuantizedWeight:
        name = f"{layer}.weight"
        raw, kind = self._raw(name, part.rows), self._stored(name).kind
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
        config = self._config
        head = f"{config.names.head}.weight"
        for name, shape in all_shapes(config).items():
            place, expert = _place(name, config)
            stored = self._file.tensors.get(place)
            if stored is None:
                if name == head and config.tied_embeddings:
                    continue
                raise ModelError(f"tensor {place} is missing from {path}")
            wanted = shape if expert is None else (config.num_experts, *shape)
            if stored.shape != wanted:
                raise ModelError(
                    f"{path}: tensor {place} has shape {stored.shape}, the config says {wanted}"
                )
            self._places[name] = (place, expert)
        known = {place for place, _ in self._places.values()}
        for place in self._file.tensors:
            if place not in known and place not in _OF_THE_CONFIG:
                raise ModelError(f"{path}: unexpected tensor {place}; the model has none such")

    def _stored(self, name: str) -> StoredTensor:
        return self._file.tensors[self._places[name][0]]

    def _chunks(
        self,
        name: str,
        stored: StoredTensor,
        rows: tuple[int, int] | None,
        columns: tuple[int, int] | None,
        dtype: torch.dtype,
    ) -> Iterator[torch.Tensor]:
        """Rows of this type, in chunks, because intermediate values take more memory."""
        raw = self._raw(name, rows) if len(stored.shape) > 1 else self._vector(name)
        step = max(1, _CHUNK_FEATURES // stored.shape[-1])
        for begin in range(0, len(raw), step):
            wide = torch.from_numpy(dequantize(raw[begin : begin + step], stored.kind))
            yield (wide if columns is None else wide[:, slice(*columns)]).to(dtype, copy=True)
        if not len(raw):
            yield torch.empty(0, stored.shape[-1], dtype=dtype)

    def _vector(self, name: str) -> Bytes:
        return self._file.rows(self._places[name][0], 0, 1)

    def _raw(self, name: str, rows: tuple[int, int] | None) -> Bytes:
        """Rows of a matrix as stored, in the order of a folder."""
        place, expert = self._places[name]
        height = self._file.tensors[place].shape[-2]
        first = 0 if expert is None else expert * height
        begin, end = rows or (0, height)
        order = self._order(name)
        if order is None:
            return self._file.rows(place, first + begin, first + end)
        return self._file.rows(place, first, first + height)[order[begin:end].numpy()]

    def _order(self, name: str) -> torch.Tensor | None:
        """The file's position of each row of q or k; None if the order is a folder's."""
        if not self._family.permuted:
            return None
        config, layer = self._config, name.rpartition(".")[0]
        if layer.endswith(config.names.q):
            heads = config.num_heads
        elif config.names.k is not None and layer.endswith(config.names.k):
            heads = config.num_kv_heads
        else:
            return None
        size = config.head_dim
        return torch.arange(heads * size).view(heads, size // 2, 2).transpose(1, 2).flatten()


def _places_in_a_layer(names: Names) -> dict[str, str]:
    pairs = {
        names.input_norm: "attn_norm",
        names.attention_out_norm: "post_attention_norm",
        names.mlp_norm: "ffn_norm",
        names.mlp_out_norm: "post_ffw_norm",
        names.out: "attn_output",
        names.q_norm: "attn_q_norm",
        names.k_norm: "attn_k_norm",
        names.down: "ffn_down",
        names.router: "ffn_gate_inp",
        names.gate: "ffn_gate",
        names.up: "ffn_up",
        names.gate_up: "ffn_up",
        names.qkv: "attn_qkv",
    }
    if names.qkv is None:
        pairs |= {names.q: "attn_q", names.k: "attn_k", names.v: "attn_v"}
    return {ours: theirs for ours, theirs in pairs.items() if ours is not None}


def _place(name: str, config: DecoderConfig) -> _Place:
    """The place in the file of a tensor with this name in a folder."""
    names = config.names
    layer_name, _, ending = name.rpartition(".")
    ends = {names.embedding: "token_embd", names.final_norm: "output_norm", names.head: "output"}
    if layer_name in ends:
        return f"{ends[layer_name]}.{ending}", None
    front, back = names.layer.split("{}")
    layer, _, inside = layer_name.removeprefix(front).partition(back)
    expert_front, expert_back = names.expert.split("{}")
    if inside.startswith(expert_front):
        number, _, which = inside.removeprefix(expert_front).partition(expert_back)
        kinds = {names.expert_gate: "gate", names.expert_up: "up", names.expert_down: "down"}
        return f"blk.{layer}.ffn_{kinds[which]}_exps.{ending}", int(number)
    return f"blk.{layer}.{_places_in_a_layer(names)[inside]}.{ending}", None
