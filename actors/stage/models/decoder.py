"""The forward pass of one stage over one hybrid batch.

Linear layers see all tokens of all requests as one matrix; only attention distinguishes requests.
Shape suffixes as in `kernels.interface`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from actors.stage.models import additions
from actors.stage.models.config import DecoderConfig
from actors.stage.models.embedding import LayerInputs, look_up
from actors.stage.models.latent import latent_qkv, latent_values
from actors.stage.models.mixers import mixed, mixed_beside, sigmoid
from actors.transport.group import RankGroup
from kernels.adapters import AdapterModule
from kernels.interface import AttentionShape, Backend, Batch, DecoderStack, KVLayer
from kernels.layer_form import LayerForm
from kernels.layer_weights import LayerWeights, Linear
from kernels.recurrence import StateLayer


@dataclass(slots=True)
class StageWeights:
    """Weights of one rank of one stage. First stage: embeddings and their norm, if there is one;
    last stage: norm and head.

    embedding_VH and head cover rows [vocab_start, vocab_start + V) of the vocabulary.
    positions_PH: None unless positions are learned. cos_sin_PD: for layers without their own.
    """

    layers: list[LayerWeights]
    additions: list[additions.LayerAdditions | None]
    embedding_VH: torch.Tensor | None
    layer_inputs: LayerInputs | None
    positions_PH: torch.Tensor | None
    embedding_norm_H: torch.Tensor | None
    embedding_norm_bias_H: torch.Tensor | None
    final_norm_H: torch.Tensor | None
    final_norm_bias_H: torch.Tensor | None
    head: Linear | None
    vocab_start: int
    cos_sin_PD: torch.Tensor
    hidden_size: int
    dtype: torch.dtype


class Decoder:
    """Runs a stage's layers. `attach` gives it the KV cache before the first `layers` call."""

    def __init__(
        self,
        weights: StageWeights,
        backend: Backend,
        shape: AttentionShape,
        config: DecoderConfig,
        group: RankGroup,
    ) -> None:
        self._weights = weights
        self._backend = backend
        self._shape = shape
        self._config = config
        self._form = LayerForm(
            eps=config.norm_eps,
            norm=config.norm,
            activation=config.activation,
            gated=config.names.gated,
            parallel=config.parallel,
            whole_qk_norm=config.qk_norm == "whole",
        )
        self._group = group
        self._kv: Sequence[KVLayer | StateLayer] = ()
        self._beside: Sequence[StateLayer | None] = ()
        self._stack: DecoderStack | None = None
        self.shapes = additions.shapes_of(shape, weights.layers, weights.additions)
        self.cached_shapes = additions.cached(self.shapes, weights.layers, weights.additions)
        self._embedding_scale = config.embedding_scale
        if config.rounds_embedding_scale:
            self._embedding_scale = torch.tensor(config.embedding_scale, dtype=weights.dtype).item()
        self.device = weights.cos_sin_PD.device
        self.vocab_size = config.vocab_size
        self.shard_width = -(-config.vocab_size // group.size)  # of each rank's logits

    def attach(self, kv: Sequence[KVLayer | StateLayer], beside: Sequence[StateLayer] = ()) -> None:
        """Use these caches and states; beside: of mixers beside attention. May fuse the layers."""
        w = self._weights
        self._kv = additions.caches_of(w.additions, kv)
        self._beside = beside or [None] * len(w.layers)
        sums = self._group.sums
        # A q/k norm over all heads needs another sum over ranks, which fused layers lack.
        fuses = self._group.size == 1 or (sums is not None and not self._form.whole_qk_norm)
        fuses = fuses and all(layer.may_fuse for layer in w.layers) and not any(w.additions)
        if w.layers and fuses:
            self._stack = self._backend.decoder_stack(
                w.layers, kv, w.cos_sin_PD, self._shape, self._form, sums
            )

    def empty_hidden(self, num_tokens: int = 0) -> torch.Tensor:
        """Uninitialized hidden states; with no tokens, the output of a step without slices."""
        w = self._weights
        return torch.empty((num_tokens, w.hidden_size), dtype=w.dtype, device=self.device)

    def embed(self, tokens_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Token ids -> (T, H), with the layers' inputs, where they have any, beside it."""
        w = self._weights
        if w.embedding_VH is None:
            raise RuntimeError("only the first stage embeds tokens")
        if self._group.size == 1:
            x_TH = functional.embedding(tokens_T, w.embedding_VH)
        else:
            x_TH = look_up(tokens_T, w.embedding_VH, w.vocab_start, self._group)
        if self._embedding_scale != 1.0:
            x_TH *= self._embedding_scale
        if w.positions_PH is not None:
            x_TH += functional.embedding(positions_T, w.positions_PH)
        if w.embedding_norm_H is not None:
            x_TH = self._normed(x_TH, w.embedding_norm_H, w.embedding_norm_bias_H)
        if w.layer_inputs is not None:
            x_TH = w.layer_inputs.join(tokens_T, x_TH, self._group, self._backend, self._form.eps)
        return x_TH

    def layers(self, x_TH: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """All layers of this stage -> (x, residual), whose sum is the result. x_TH may change."""
        if self._stack is not None:
            return self._stack(x_TH, None, batch)
        part_TH, out_norm_H, ours = None, None, self._weights
        residual_TH = x_TH[:, : ours.hidden_size].contiguous()
        layers = zip(ours.layers, ours.additions, self._kv, self._beside, self.shapes, strict=True)
        for w, own, kv, state, shape in layers:
            input_TH = self._reduced_normed(
                part_TH, out_norm_H, residual_TH, w.input_norm_H, w.input_norm_bias_H
            )
            attended_TX = self._attend(w, own, input_TH, batch, kv, shape)
            attended_TH = self._linear(w.out, w.adapters.out, attended_TX, batch)
            if w.beside is not None:
                beside = (w.beside, w.adapters, input_TH, state, batch, self._group)
                attended_TH += mixed_beside(*beside, self._linear)
            if not w.has_mlp:
                part_TH, out_norm_H = attended_TH, w.attention_out_norm_H
                continue
            if self._form.parallel:
                if w.post_norm_H is not None:
                    input_TH = self._normed(residual_TH, w.post_norm_H, w.post_norm_bias_H)
                part_TH = attended_TH + self._mlp(w, input_TH, batch)
                continue
            input_TH = self._reduced_normed(
                attended_TH, w.attention_out_norm_H, residual_TH, w.post_norm_H, w.post_norm_bias_H
            )
            part_TH, out_norm_H = self._mlp(w, input_TH, batch), w.mlp_out_norm_H
            if own is not None:
                end = (self._backend, self._group, self._form)
                additions.end_layer(own, w, part_TH, residual_TH, x_TH, *end)
                part_TH, out_norm_H = None, None
        if part_TH is None:  # a stage without layers passes its input on
            return torch.zeros_like(residual_TH), residual_TH
        return self._result_normed(self._group.all_reduce(part_TH), out_norm_H), residual_TH

    def _linear(
        self, linear: Linear, adapters: AdapterModule | None, x_TK: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        y_TO = linear(x_TK)
        if batch.adapters is not None and adapters is not None:
            self._backend.add_adapters(adapters, x_TK, y_TO, batch.adapters)
        return y_TO

    def _attend(
        self, w: LayerWeights, own: additions.LayerAdditions | None, x_TH: torch.Tensor,
        batch: Batch, kv: KVLayer | StateLayer, shape: AttentionShape,
    ) -> torch.Tensor:  # fmt: skip
        qkv_TX = self._linear(w.qkv, w.adapters.qkv, x_TH, batch)
        gates_TX = None
        if w.gates is not None:
            gates_TX = self._linear(w.gates, w.adapters.gates, x_TH, batch)
        if w.mixer is not None:
            return mixed(w.mixer, qkv_TX, gates_TX, kv, batch, self._group)
        if w.latent is not None:
            qkv_TX = latent_qkv(w.latent, qkv_TX, self._backend)
        if own is not None:
            qkv_TX = additions.norm_values(qkv_TX, own, self._backend, self._form.eps)
        q_norm_D, k_norm_D = w.q_norm_D, w.k_norm_D
        if self._form.whole_qk_norm and q_norm_D is not None and k_norm_D is not None:
            widths = [len(q_norm_D), len(k_norm_D), len(k_norm_D)]
            q_TX, k_TX, v_TX = torch.split(qkv_TX, widths, dim=1)
            q_TX, k_TX = self._whole_norm(q_TX, q_norm_D), self._whole_norm(k_TX, k_norm_D)
            qkv_TX, q_norm_D, k_norm_D = torch.cat((q_TX, k_TX, v_TX), dim=1), None, None
        table_PD = self._weights.cos_sin_PD if w.cos_sin_PD is None else w.cos_sin_PD
        cache = kv if own is None or own.has_cache else None
        q_TND = self._backend.rope_and_cache(
            qkv_TX, table_PD, batch, cache, shape, q_norm_D, k_norm_D, self._form.eps
        )
        if w.query_scales_P is not None:
            scales_T = functional.embedding(batch.positions_T, w.query_scales_P[:, None])
            q_TND = (q_TND * scales_T[..., None]).to(q_TND.dtype)  # rounded once
        attended_TX = self._backend.attention(q_TND, batch, kv, shape)
        if gates_TX is not None:
            attended_TX *= sigmoid(gates_TX.float()).to(attended_TX.dtype)
        return attended_TX if w.latent is None else latent_values(w.latent, attended_TX, shape)

    def _mlp(self, w: LayerWeights, x_TH: torch.Tensor, batch: Batch) -> torch.Tensor:
        if w.gate_up is None or w.down is None:
            if w.experts is None:
                raise ValueError("a layer has neither an MLP nor experts")
            return self._backend.moe(x_TH, w.experts, self._form)
        inner_TX = self._linear(w.gate_up, w.adapters.gate_up, x_TH, batch)
        inner_TX = self._backend.activate(inner_TX, self._form.activation, self._form.gated)
        return self._linear(w.down, w.adapters.down, inner_TX, batch)

    def _whole_norm(self, x_TX: torch.Tensor, weight_X: torch.Tensor) -> torch.Tensor:
        """RMS norm of a vector split over ranks. Heads held by several ranks count as often in the
        sum as in the width."""
        if self._group.size == 1:
            return self._backend.rms_norm(x_TX.contiguous(), weight_X, self._form.eps)
        wide_TX = x_TX.float()
        squares_T1 = self._group.all_reduce(wide_TX.square().sum(-1, keepdim=True))
        mean_T1 = squares_T1 / (self._group.size * len(weight_X))
        return weight_X * (wide_TX * torch.rsqrt(mean_T1 + self._form.eps)).to(x_TX.dtype)

    def _normed(
        self, x_TH: torch.Tensor, weight_H: torch.Tensor, bias_H: torch.Tensor | None
    ) -> torch.Tensor:
        if self._form.norm == "layer":
            return self._backend.layer_norm(x_TH, weight_H, bias_H, self._form.eps)
        return self._backend.rms_norm(x_TH, weight_H, self._form.eps)

    def _reduced_normed(
        self, part_TH: torch.Tensor | None, out_norm_H: torch.Tensor | None,
        residual_TH: torch.Tensor, weight_H: torch.Tensor | None, bias_H: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """`_sum_normed` of the sum of all ranks' parts, normed by out_norm_H: one operation where
        the backend has it."""
        if part_TH is None:
            return self._sum_normed(None, residual_TH, weight_H, bias_H)
        peers = self._group.peers
        plain = out_norm_H is None and self._form.norm == "rms"
        if peers is not None and plain and weight_H is not None:
            normed_TH = self._backend.reduce_add_rms_norm(
                part_TH, residual_TH, weight_H, self._form.eps, peers
            )
            if normed_TH is not None:
                return normed_TH
        result_TH = self._result_normed(self._group.all_reduce(part_TH), out_norm_H)
        return self._sum_normed(result_TH, residual_TH, weight_H, bias_H)

    def _sum_normed(
        self,
        x_TH: torch.Tensor | None,
        residual_TH: torch.Tensor,
        weight_H: torch.Tensor | None,
        bias_H: torch.Tensor | None,
    ) -> torch.Tensor:
        """residual += x in place; returns the norm of the new residual, or itself without one."""
        if x_TH is not None:
            if weight_H is not None and self._form.norm == "rms":
                return self._backend.add_rms_norm(x_TH, residual_TH, weight_H, self._form.eps)
            residual_TH += x_TH
        return residual_TH if weight_H is None else self._normed(residual_TH, weight_H, bias_H)

    def _result_normed(self, x_TH: torch.Tensor, weight_H: torch.Tensor | None) -> torch.Tensor:
        return x_TH if weight_H is None else self._normed(x_TH, weight_H, None)

    def final_norm(self, x_RH: torch.Tensor, residual_RH: torch.Tensor) -> torch.Tensor:
        """Norm of these rows' hidden state; overwrites residual_RH."""
        norm_H = self._weights.final_norm_H
        if norm_H is None:
            raise RuntimeError("only the last stage has the final norm")
        return self._sum_normed(x_RH, residual_RH, norm_H, self._weights.final_norm_bias_H)

    def final_norm_of(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, rows: Iterable[int]
    ) -> torch.Tensor:
        """Like `final_norm`, on copies of some rows, which may be needed again."""
        index = torch.from_numpy(np.fromiter(rows, np.int64)).to(x_TH.device)
        return self.final_norm(x_TH[index], residual_TH[index])

    def logits(
        self, normed_RH: torch.Tensor, place_RV: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """(R, vocabulary) float32 on rank 0, in place_RV if given; None on the others."""
        return self.gather_logits(self.sharded_logits(normed_RH), place_RV)

    def sharded_logits(self, normed_RH: torch.Tensor) -> torch.Tensor:
        """This rank's vocabulary shard, unscaled. It is equally wide on every rank; columns past
        the end of the vocabulary are meaningless."""
        if self._weights.head is None:
            raise RuntimeError("only the last stage has the language-model head")
        return self._weights.head.forward_f32(normed_RH)

    def gather_logits(
        self, sharded_RV: torch.Tensor, place_RV: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """The shards of all ranks joined, as `logits` returns them."""
        alone = self._group.size == 1
        whole_RV = sharded_RV if alone else self._group.gather_columns(sharded_RV)
        return None if whole_RV is None else self._scaled(whole_RV[:, : self.vocab_size], place_RV)

    def local_logits(self, sharded_RV: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The logits of this rank's shard, and the token id of its first column."""
        first_id = self._weights.vocab_start
        return self._scaled(sharded_RV[:, : max(0, self.vocab_size - first_id)], None), first_id

    def _scaled(self, logits_RV: torch.Tensor, place_RV: torch.Tensor | None) -> torch.Tensor:
        config = self._config
        if place_RV is None or config.logit_scale != 1.0 or config.logit_softcap is not None:
            logits_RV = logits_RV.float()
        if config.logit_scale != 1.0:
            logits_RV = logits_RV * config.logit_scale
        if config.logit_softcap is not None:
            logits_RV = torch.tanh(logits_RV / config.logit_softcap) * config.logit_softcap
        return logits_RV if place_RV is None else place_RV.copy_(logits_RV)
