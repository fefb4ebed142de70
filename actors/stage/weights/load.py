"""Loads the packed weights of one rank of one stage from a weight source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from actors.stage.models.config import DecoderConfig
from actors.stage.models.decoder import StageWeights
from actors.stage.models.rope import cos_sin_table, feature_order
from actors.stage.models.split import Range, Split
from actors.stage.spec import StageSpec
from actors.stage.weights.names import (
    Piece,
    gate_up_pieces,
    layer_prefix,
    linear_shapes,
    num_rows,
    qkv_pieces,
)
from actors.stage.weights.source import WHOLE, PackedSource, Shard, WeightSource
from kernels.interface import Backend
from kernels.layer_weights import Experts, LayerWeights, Linear
from kernels.quantized import QuantizedWeight

Progress = Callable[[float], None]


@dataclass
class Loader:
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
        self._shapes = linear_shapes(self.config, False) | linear_shapes(self.config, True)

    def stage(self, max_model_len: int, progress: Progress) -> StageWeights:
        """All weights of the stage. progress: called with the fraction done, 0 to 1."""
        spec, config = self.spec, self.config
        first, end = self.split.layers
        parts_done, parts_all = 0, end - first + spec.is_first + spec.is_last

        def step() -> None:
            nonlocal parts_done
            parts_done += 1
            progress(parts_done / parts_all)

        names = config.names
        tied = config.tied_embeddings and not self._stores_head()
        vocabulary_VH = (
            self._vocabulary(names.embedding) if spec.is_first or (tied and spec.is_last) else None
        )
        if spec.is_first:
            step()
        tables = {
            rope: cos_sin_table(rope, max_model_len, config.head_dim).to(self.device)
            for rope in dict.fromkeys(config.ropes[first:end])
        }
        usual = config.ropes[first]
        layers = []
        for layer in range(first, end):
            rope = config.ropes[layer]
            table = None if rope == usual else tables[rope]
            layers.append(self._layer(layer, table, max_model_len))
            step()
        first_norm = names.embedding_norm if spec.is_first else None
        norm_H, norm_bias_H, head = None, None, None
        if spec.is_last:
            norm_H, norm_bias_H = self._norm(names.final_norm), self._norm_bias(names.final_norm)
            head_VH = vocabulary_VH if tied else self._head(vocabulary_VH)
            if head_VH is None:
                raise RuntimeError("a tied head needs the embedding")
            # int4 is too coarse for the language-model head, whose weight has 8 bits.
            stored = {"none": "none", "w8a8": "w8a8", "w4a8": "w8a8"}
            head = self.backend.pack_linear(head_VH, None, stored.get(spec.quantization, "int8"))
            step()
        return StageWeights(
            layers=layers,
            embedding_VH=vocabulary_VH if spec.is_first else None,
            positions_PH=self._positions(max_model_len) if spec.is_first else None,
            embedding_norm_H=None if first_norm is None else self._norm(first_norm),
            embedding_norm_bias_H=None if first_norm is None else self._norm_bias(first_norm),
            final_norm_H=norm_H,
            final_norm_bias_H=norm_bias_H,
            head=head,
            vocab_start=self.split.vocab[0],
            cos_sin_PD=tables[usual],
            hidden_size=config.hidden_size,
            dtype=self.dtype,
        )

    def _layer(
        self, layer: int, cos_sin_PD: torch.Tensor | None, max_model_len: int
    ) -> LayerWeights:
        prefix, config, part = layer_prefix(self.config, layer), self.config, self.split
        names = config.names

        def norm(name: str | None) -> torch.Tensor | None:
            return None if name is None else self._norm(prefix + name)

        def bias(name: str | None) -> torch.Tensor | None:
            return None if name is None else self._norm_bias(prefix + name)

        mixture = config.has_experts(layer)
        return LayerWeights(
            input_norm_H=norm(names.input_norm),
            qkv=self._column_parallel(prefix, qkv_pieces(config, part)),
            out=self._row_parallel(prefix, names.out, part.q),
            post_norm_H=norm(names.mlp_norm),
            gate_up=None
            if mixture
            else self._column_parallel(prefix, gate_up_pieces(config, part)),
            down=None if mixture else self._row_parallel(prefix, names.down, part.inner),
            experts=self._experts(prefix) if mixture else None,
            cos_sin_PD=cos_sin_PD,
            query_scales_P=self._query_scales(layer, max_model_len),
            q_norm_D=self._head_norm(layer, names.q_norm, config.num_heads, part.q),
            k_norm_D=self._head_norm(layer, names.k_norm, config.num_kv_heads, part.kv),
            sliding_window=config.sliding_windows[layer],
            sinks_N=self._sinks(prefix),
            input_norm_bias_H=bias(names.input_norm),
            post_norm_bias_H=bias(names.mlp_norm),
            attention_out_norm_H=norm(names.attention_out_norm),
            mlp_out_norm_H=norm(names.mlp_out_norm),
        )

    def _experts(self, prefix: str) -> Experts:
        """This rank's part of every expert; the router is whole and never quantized."""
        config, names, inner = self.config, self.config.names, self.split.expert_inner
        router_EH = self._dense(prefix + names.router, self._shapes[names.router][0], WHOLE)
        router_bias_E = self._bias(prefix, names.router, None)
        gate_ups, downs = [], []
        for expert in names.experts(config.num_experts):
            pieces = [Piece(expert + n, inner) for n in (names.expert_gate, names.expert_up)]
            gate_ups.append(self._column_parallel(prefix, pieces))
            downs.append(self._row_parallel(prefix, expert + names.expert_down, inner))
        return Experts(
            self.backend.pack_linear(router_EH, router_bias_E), gate_ups, downs,
            config.experts_per_token, config.normalizes_expert_weights, config.scales_expert_inputs,
        )  # fmt: skip

    def _column_parallel(self, prefix: str, pieces: list[Piece]) -> Linear:
        """Projections whose output features are split over ranks, as one matrix."""
        biases = [self._bias(prefix, piece.name, piece) for piece in pieces]
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

    def _row_parallel(self, prefix: str, name: str, columns: Range) -> Linear:
        """A projection whose input features are split; ranks' results are summed, so rank 0 alone
        adds the bias."""
        bias_O = self._bias(prefix, name, None) if self.spec.rank == 0 else None
        return self._pack(prefix, [(name, Shard(columns=columns), None)], bias_O)

    def _pack(
        self,
        prefix: str,
        parts: list[tuple[str, Shard, torch.Tensor | None]],
        bias_O: torch.Tensor | None,
    ) -> Linear:
        """Parts of layers, stacked by rows. Layers stored quantized stay so."""
        shapes = self._shapes
        if self.packed is not None and all(prefix + name in self.packed for name, _, _ in parts):
            whole = [
                _reordered(self.packed.read(prefix + name, shapes[name][0], part), order)
                for name, part, order in parts
            ]
            self.num_parameters += sum(weight.values_OK.numel() for weight in whole)
            return self.backend.pack_quantized(whole, bias_O, self.dtype, self.device)
        weights = [
            self._dense(prefix + name, shapes[name][0], part, order, self.config.names.transposed)
            for name, part, order in parts
        ]
        weight_OK = torch.cat(weights) if len(weights) > 1 else weights[0]
        return self.backend.pack_linear(weight_OK, bias_O, self.spec.quantization)

    def _dense(
        self,
        name: str,
        shape: tuple[int, int],
        part: Shard,
        order: torch.Tensor | None = None,
        transposed: bool = False,
    ) -> torch.Tensor:
        """(out, in) features. transposed: the tensor is stored as (in, out)."""
        if self.packed is not None and name in self.packed:
            weight_OK = self.packed.read(name, shape, part).dequantize(self.dtype)
        elif transposed:
            turned = Shard(rows=part.columns, columns=part.rows)
            weight_OK = self.source.read(f"{name}.weight", shape[::-1], turned).T
        else:
            weight_OK = self.source.read(f"{name}.weight", shape, part)
        if order is not None:
            weight_OK = weight_OK[order]
        self.num_parameters += weight_OK.numel()
        return weight_OK.to(self.device).contiguous()

    def _bias(self, prefix: str, name: str, piece: Piece | None) -> torch.Tensor | None:
        """GPTQ tools store a bias with every layer, whether or not the architecture has one."""
        (out_features, _), biased = self._shapes[name]
        if not biased and not (self.packed is not None and self.packed.has_bias(prefix + name)):
            return None
        part = WHOLE if piece is None else Shard(rows=piece.rows)
        return self._fetch(
            f"{prefix}{name}.bias", (out_features,), part, None if piece is None else piece.order
        )

    def _norm(self, name: str) -> torch.Tensor:
        return self._offset(self._fetch(f"{name}.weight", (self.config.hidden_size,)))

    def _norm_bias(self, name: str) -> torch.Tensor | None:
        if not self.config.norm_bias:
            return None
        return self._fetch(f"{name}.bias", (self.config.hidden_size,))

    def _query_scales(self, layer: int, max_model_len: int) -> torch.Tensor | None:
        temperature = self.config.temperature
        if temperature is None or self.config.ropes[layer].dim or max_model_len < temperature[1]:
            return None
        ends_P = torch.arange(1, max_model_len + 1, device=self.device)
        return 1 + temperature[0] * (ends_P // temperature[1]).log1p()

    def _head_norm(self, layer: int, name: str, num_heads: int, part: Range) -> torch.Tensor | None:
        """A norm of each head, in our feature order; or this rank's part of a norm of all heads."""
        config, name = self.config, layer_prefix(self.config, layer) + name
        if config.qk_norm == "none":
            return None
        if config.qk_norm == "unit":
            ones_D = torch.ones(config.head_dim, dtype=self.dtype, device=self.device)
            return ones_D if config.ropes[layer].dim else None
        if config.qk_norm == "whole":
            size = num_heads * config.head_dim
            return self._offset(self._fetch(f"{name}.weight", (size,), Shard(rows=part)))
        order = feature_order(config.ropes, config.head_dim)
        return self._offset(self._fetch(f"{name}.weight", (config.head_dim,), WHOLE, order))

    def _sinks(self, prefix: str) -> torch.Tensor | None:
        """The attention sinks of this rank's heads."""
        config, (begin, end) = self.config, self.split.q
        if config.names.sinks is None:
            return None
        heads = Shard(rows=(begin // config.head_dim, end // config.head_dim))
        return self._fetch(prefix + config.names.sinks, (config.num_heads,), heads).float()

    def _offset(self, weight: torch.Tensor) -> torch.Tensor:
        offset = self.config.norm_offset
        return weight.float() + offset if offset else weight  # 1 + w has no room in half precision

    def _positions(self, max_model_len: int) -> torch.Tensor | None:
        config, name = self.config, self.config.names.positions
        if name is None:
            return None
        first = config.position_offset
        shape = (config.max_positions + first, config.hidden_size)
        return self._fetch(f"{name}.weight", shape, Shard(rows=(first, first + max_model_len)))

    def _vocabulary(self, name: str) -> torch.Tensor:
        """This rank's rows of an embedding or head, padded with zeros to the common length."""
        size, (start, end) = self.config.vocab_size, self.split.vocab
        rows = (min(start, size), min(end, size))
        part_VH = self._dense(name, (size, self.config.hidden_size), Shard(rows=rows))
        missing = (end - start) - part_VH.shape[0]
        return functional.pad(part_VH, (0, 0, 0, missing)) if missing else part_VH

    def _stores_head(self) -> bool:
        name, packed = self.config.names.head, self.packed or ()
        return name in packed or self.source.stores(f"{name}.weight")

    def _head(self, embedding_VH: torch.Tensor | None) -> torch.Tensor:
        """The stored head, even if the config says that it is tied: tools that untie the two leave
        that key behind. One equal to the embedding takes no memory of its own."""
        before = self.num_parameters
        head_VH = self._vocabulary(self.config.names.head)
        shared_VH = embedding_VH if self.config.tied_embeddings else None
        if shared_VH is None or not torch.equal(head_VH, shared_VH):
            return head_VH
        self.num_parameters = before
        return shared_VH

    def _fetch(
        self,
        name: str,
        shape: tuple[int, ...],
        part: Shard = WHOLE,
        order: torch.Tensor | None = None,
    ) -> torch.Tensor:
        tensor = self.source.read(name, shape, part)
        if order is not None:
            tensor = tensor[order]
        self.num_parameters += tensor.numel()
        return tensor.to(self.device)


def _reordered(weight: QuantizedWeight, order: torch.Tensor | None) -> QuantizedWeight:
    return weight if order is None else weight.reordered(order)
