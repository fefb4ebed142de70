"""Loads the packed weights of one rank of one stage from a weight source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch.nn import functional

from actors.stage.models.decoder import StageWeights
from actors.stage.models.rope import cos_sin_table, feature_order
from actors.stage.models.split import Range, split
from actors.stage.weights.additions import load_additions, load_layer_inputs
from actors.stage.weights.experts import load_experts
from actors.stage.weights.latent import load_latent
from actors.stage.weights.linears import LinearLoader
from actors.stage.weights.mixers import load_beside, load_mixer, load_rates, mixer_pieces
from actors.stage.weights.multipliers import multiplied
from actors.stage.weights.names import (
    gate_pieces,
    gate_up_pieces,
    heads_in_order,
    layer_prefix,
    mlp_prefix,
    qkv_pieces,
)
from actors.stage.weights.source import WHOLE, Shard
from kernels.layer_weights import LayerWeights, Linear

Progress = Callable[[float], None]


class Loader(LinearLoader):
    """Reads this rank's slices of all layers, and of what comes before and after them."""

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
            self.vocabulary(names.embedding) if spec.is_first or (tied and spec.is_last) else None
        )
        if spec.is_first:
            step()
        dims = {config.ropes[layer]: config.at(layer).head_dim for layer in range(first, end)}
        tables = {
            rope: cos_sin_table(rope, max_model_len, dim).to(self.device)
            for rope, dim in dims.items()
        }
        usual = config.ropes[first]
        layers, additions = [], []
        for layer in range(first, end):
            rope = config.ropes[layer]
            table = None if rope == usual else tables[rope]
            loader = self._at(layer)
            layers.append(loader._layer(layer, table, max_model_len))
            additions.append(load_additions(loader, config.kinds, layer))
            self.num_parameters = loader.num_parameters
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
            kind = stored.get(spec.quantization, "int8")
            head = self.backend.pack_linear(head_VH, self._head_bias(), kind)
            step()
        return StageWeights(
            layers=layers,
            additions=additions,
            layer_inputs=load_layer_inputs(self) if spec.is_first else None,
            embedding_VH=vocabulary_VH if spec.is_first else None,
            positions_PH=self._positions(max_model_len) if spec.is_first else None,
            embedding_norm_H=self._norm(first_norm),
            embedding_norm_bias_H=self._norm_bias(first_norm),
            final_norm_H=norm_H,
            final_norm_bias_H=norm_bias_H,
            head=head,
            vocab_start=self.split.vocab[0],
            cos_sin_PD=tables[usual],
            hidden_size=config.hidden_size,
            dtype=self.dtype,
        )

    def _at(self, layer: int) -> Loader:
        """A loader of this layer, where layers are of several sizes."""
        config = self.config.at(layer)
        if config is self.config:
            return self
        return replace(self, config=config, split=split(config, self.spec))

    def _layer(
        self, layer: int, cos_sin_PD: torch.Tensor | None, max_model_len: int
    ) -> LayerWeights:
        prefix, config, part = layer_prefix(self.config, layer), self.config, self.split
        names = config.names

        norm, bias = partial(self._norm, prefix=prefix), partial(self._norm_bias, prefix=prefix)
        mixture, mixed = config.has_experts(layer), config.has_mixer(layer)
        mlp = mlp_prefix(config, layer) if config.has_mlp(layer) else None
        dense = mlp if not mixture or config.experts_beside else None
        inputs = mixer_pieces(config, part) if mixed else qkv_pieces(config, part)
        out, results = (names.mixer.out, part.mixed) if mixed else (names.out, part.attended)
        weights = LayerWeights(
            input_norm_H=norm(names.input_norm),
            qkv=self.column_parallel(prefix, inputs),
            out=self.row_parallel(prefix, out, results),
            post_norm_H=self._norm(names.mlp_norm, mlp) if mlp else None,
            gate_up=self.column_parallel(dense, gate_up_pieces(config, part)) if dense else None,
            down=self.row_parallel(dense, names.down, part.inner) if dense else None,
            experts=load_experts(self, mlp) if mlp and mixture else None,
            cos_sin_PD=cos_sin_PD,
            query_scales_P=self._query_scales(layer, max_model_len),
            q_norm_D=self._head_norm(layer, names.q_norm, config.num_heads, part.q),
            k_norm_D=self._head_norm(layer, names.k_norm, config.num_kv_heads, part.kv),
            gates=load_rates(self, prefix) if mixed else self._gates(prefix),
            mixer=load_mixer(self, prefix) if mixed else None,
            beside=load_beside(self, prefix) if config.mixer_beside else None,
            sliding_window=config.sliding_windows[layer],
            sinks_N=self._sinks(prefix),
            latent=None if mixed else load_latent(self, prefix),
            input_norm_bias_H=bias(names.input_norm),
            post_norm_bias_H=bias(names.mlp_norm),
            attention_out_norm_H=norm(names.attention_out_norm),
            mlp_out_norm_H=norm(names.mlp_out_norm),
        )
        return multiplied(weights, config.multipliers) if config.multipliers else weights

    def _gates(self, prefix: str) -> Linear | None:
        pieces = gate_pieces(self.config, self.split)
        return self.column_parallel(prefix, pieces) if pieces else None

    def _norm(self, name: str | None, prefix: str = "") -> torch.Tensor | None:
        if name is None:
            return None
        if not self.config.norm_weights:
            return torch.ones(self.config.hidden_size, dtype=self.dtype, device=self.device)
        return self._offset(self.fetch(f"{prefix}{name}.weight", (self.config.hidden_size,)))

    def _norm_bias(self, name: str | None, prefix: str = "") -> torch.Tensor | None:
        if name is None or not self.config.norm_bias:
            return None
        return self.fetch(f"{prefix}{name}.bias", (self.config.hidden_size,))

    def _query_scales(self, layer: int, max_model_len: int) -> torch.Tensor | None:
        given, rotated = self.config.temperature, self.config.ropes[layer].dim > 0
        if given is None or rotated != given.rotated or max_model_len + given.first <= given.length:
            return None
        counts_P = torch.arange(given.first, max_model_len + given.first, device=self.device)
        return 1 + given.slope * (counts_P // given.length).log1p()

    def _head_norm(self, layer: int, name: str, num_heads: int, part: Range) -> torch.Tensor | None:
        """A norm of each head, in our feature order; or this rank's part of a norm of all heads."""
        config = self.config
        is_absent = name == config.names.k_norm and config.names.k is None
        if config.qk_norm == "none" or is_absent or config.has_mixer(layer):
            return None
        if config.qk_norm == "unit":
            ones_D = torch.ones(config.head_dim, dtype=self.dtype, device=self.device)
            return ones_D if config.ropes[layer].dim else None
        order = feature_order(config.ropes, config.head_dim)
        name = layer_prefix(config, layer) + name
        if config.qk_norm == "whole":
            size, held = num_heads * config.head_dim, (part[1] - part[0]) // config.head_dim
            order = heads_in_order(held, order)
            return self._offset(self.fetch(f"{name}.weight", (size,), Shard(rows=part), order))
        return self._offset(self.fetch(f"{name}.weight", (config.head_dim,), WHOLE, order))

    def _sinks(self, prefix: str) -> torch.Tensor | None:
        """The attention sinks of this rank's heads."""
        config, (begin, end) = self.config, self.split.q
        if config.names.sinks is None:
            return None
        heads = Shard(rows=(begin // config.head_dim, end // config.head_dim))
        return self.fetch(prefix + config.names.sinks, (config.num_heads,), heads).float()

    def _offset(self, weight: torch.Tensor) -> torch.Tensor:
        offset = self.config.norm_offset
        if not offset:
            return weight.float() if self.config.wide_norms else weight
        # 1 + w has no room in half precision, to which layer norms round it all the same.
        return (weight if self.config.norm == "layer" else weight.float()) + offset

    def _positions(self, max_model_len: int) -> torch.Tensor | None:
        config, name = self.config, self.config.names.positions
        if name is None:
            return None
        first = config.position_offset
        shape = (config.max_positions + first, config.hidden_size)
        return self.fetch(f"{name}.weight", shape, Shard(rows=(first, first + max_model_len)))

    def _head_bias(self) -> torch.Tensor | None:
        if not self.config.head_bias:
            return None
        size, (start, end) = self.config.vocab_size, self.split.vocab
        part = Shard(rows=(min(start, size), min(end, size)))
        bias_V = self.fetch(f"{self.config.names.head}.bias", (size,), part)
        return functional.pad(bias_V, (0, end - start - len(bias_V)))

    def _stores_head(self) -> bool:
        name, packed = self.config.names.head, self.packed or ()
        return name in packed or self.source.stores(f"{name}.weight")

    def _head(self, embedding_VH: torch.Tensor | None) -> torch.Tensor:
        """The stored head, even if the config says that it is tied: tools that untie the two leave
        that key behind. One equal to the embedding takes no memory of its own."""
        before = self.num_parameters
        head_VH = self.vocabulary(self.config.names.head)
        shared_VH = embedding_VH if self.config.tied_embeddings else None
        if shared_VH is None or not torch.equal(head_VH, shared_VH):
            return head_VH
        self.num_parameters = before
        return shared_VH
