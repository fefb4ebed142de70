"""Linear layers and other tensors of one rank, read from a weight source and packed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from actors.stage.models.config import DecoderConfig
from actors.stage.models.split import Range, Split
from actors.stage.spec import StageSpec
from actors.stage.weights.mixer_names import mixer_linear_shapes
from actors.stage.weights.names import Piece, linear_shapes, num_rows
from actors.stage.weights.source import WHOLE, PackedSource, Shard, WeightSource
from kernels.interface import Backend
from kernels.layer_weights import Linear
from kernels.quantized import QuantizedWeight


@dataclass
class LinearLoader:
    """Reads this rank's slices, lays fused projections side by side and packs them."""

    source: WeightSource
    config: DecoderConfig
    split: Split
    spec: StageSpec
    backend: Backend
    device: torch.device
    dtype: torch.dtype
    packed: PackedSource | None = None
    num_parameters: int = 0

    def __post_init__(self) -> None:
        config = self.config
        self.shapes = linear_shapes(config, False) | linear_shapes(config, True)
        self.shapes |= mixer_linear_shapes(config)

    def column_parallel(self, prefix: str, pieces: list[Piece]) -> Linear:
        """Projections whose output features are split over ranks, as one matrix."""
        biases = [self.bias(prefix, piece.name, piece) for piece in pieces]
        bias_O = None
        if any(bias is not None for bias in biases):
            sizes = [num_rows(piece) for piece in pieces]
            bias_O = torch.cat(
                [
                    torch.zeros(size, dtype=self.dtype, device=self.device) if b is None else b
                    for b, size in zip(biases, sizes, strict=True)
                ]
            )
        parts = [(piece.name, Shard(rows=piece.rows), piece.order) for piece in pieces]
        return self._pack(prefix, parts, bias_O)

    def row_parallel(self, prefix: str, name: str, columns: Range) -> Linear:
        """A projection whose input features are split; ranks' results are summed, so rank 0 alone
        adds the bias."""
        bias_O = self.bias(prefix, name, None) if self.spec.rank == 0 else None
        return self._pack(prefix, [(name, Shard(columns=columns), None)], bias_O)

    def _pack(
        self,
        prefix: str,
        parts: list[tuple[str, Shard, torch.Tensor | None]],
        bias_O: torch.Tensor | None,
    ) -> Linear:
        """Parts of layers, stacked by rows. Layers stored quantized stay so."""
        shapes = self.shapes
        if self.packed is not None and all(prefix + name in self.packed for name, _, _ in parts):
            whole = [
                _reordered(self.packed.read(prefix + name, shapes[name][0], part), order)
                for name, part, order in parts
            ]
            self.num_parameters += sum(weight.values_OK.numel() for weight in whole)
            return self.backend.pack_quantized(whole, bias_O, self.dtype, self.device)
        weights = [
            self.dense(prefix + name, shapes[name][0], part, order, self.config.names.transposed)
            for name, part, order in parts
        ]
        weight_OK = torch.cat(weights) if len(weights) > 1 else weights[0]
        return self.backend.pack_linear(weight_OK, bias_O, self.spec.quantization)

    def dense(
        self,
        name: str,
        shape: tuple[int, int],
        part: Shard,
        order: torch.Tensor | None = None,
        transposed: bool = False,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """(out, in) features. transposed: the tensor is stored as (in, out)."""
        if self.packed is not None and name in self.packed:
            weight_OK = self.packed.read(name, shape, part).dequantize(dtype or self.dtype)
        elif transposed:
            turned = Shard(rows=part.columns, columns=part.rows)
            weight_OK = self.source.read(f"{name}.weight", shape[::-1], turned, dtype).T
        else:
            weight_OK = self.source.read(f"{name}.weight", shape, part, dtype)
        if order is not None:
            weight_OK = weight_OK[order]
        self.num_parameters += weight_OK.numel()
        return weight_OK.to(self.device).contiguous()

    def vocabulary(self, name: str, width: int | None = None) -> torch.Tensor:
        """This rank's rows of an embedding or head, padded with zeros to the common length. width:
        of a row, if not that of the hidden state."""
        size, (start, end) = self.config.vocab_size, self.split.vocab
        rows = (min(start, size), min(end, size))
        shape = (size, width or self.config.hidden_size)
        part_VH = self.dense(name, shape, Shard(rows=rows))
        missing = (end - start) - part_VH.shape[0]
        return functional.pad(part_VH, (0, 0, 0, missing)) if missing else part_VH

    def bias(self, prefix: str, name: str, piece: Piece | None) -> torch.Tensor | None:
        """GPTQ tools store a bias with every layer, whether or not the architecture has one."""
        (out_features, _), biased = self.shapes[name]
        if not biased and not (self.packed is not None and self.packed.has_bias(prefix + name)):
            return None
        part = WHOLE if piece is None else Shard(rows=piece.rows)
        return self.fetch(
            f"{prefix}{name}.bias", (out_features,), part, None if piece is None else piece.order
        )

    def fetch(
        self,
        name: str,
        shape: tuple[int, ...],
        part: Shard = WHOLE,
        order: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        tensor = self.source.read(name, shape, part, dtype)
        if order is not None:
            tensor = tensor[order]
        self.num_parameters += tensor.numel()
        return tensor.to(self.device)


def _reordered(weight: QuantizedWeight, order: torch.Tensor | None) -> QuantizedWeight:
    return weight if order is None else weight.reordered(order)
