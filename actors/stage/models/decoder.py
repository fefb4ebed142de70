"""The forward pass of one stage over one hybrid batch.

Linear layers see all tokens of all requests as one matrix; attention alone tells the requests
apart. Shape suffixes as in `kernels.interface`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from actors.transport.group import RankGroup
from kernels.interface import (
    AttentionShape,
    Backend,
    Batch,
    DecoderStack,
    KVLayer,
    LayerWeights,
    Linear,
)


@dataclass(slots=True)
class StageWeights:
    """Weights of one rank of one stage. First stage: embedding; last stage: norm and head.

    embedding_VH and head cover rows [vocab_start, vocab_start + V) of the vocabulary.
    """

    layers: list[LayerWeights]
    embedding_VH: torch.Tensor | None
    final_norm_H: torch.Tensor | None
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
        eps: float,
        vocab_size: int,
        group: RankGroup,
    ) -> None:
        self._weights = weights
        self._backend = backend
        self._shape = shape
        self._eps = eps
        self._vocab_size = vocab_size
        self._group = group
        self._kv: Sequence[KVLayer] = ()
        self._stack: DecoderStack | None = None
        self._shapes = [replace(shape, sliding_window=w.sliding_window) for w in weights.layers]
        self.device = weights.cos_sin_PD.device

    def attach(self, kv: Sequence[KVLayer]) -> None:
        """Use this cache, one entry per layer; fuses the layers where the backend can."""
        self._kv = kv
        w = self._weights
        if self._group.size == 1 and w.layers:
            self._stack = self._backend.decoder_stack(
                w.layers, kv, w.cos_sin_PD, self._shape, self._eps
            )

    def empty_hidden(self, num_tokens: int = 0) -> torch.Tensor:
        """Hidden states to be filled; of no tokens, what a step without slices hands on."""
        w = self._weights
        return torch.empty((num_tokens, w.hidden_size), dtype=w.dtype, device=self.device)

    def embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """Token ids -> (T, H). Each rank looks up its part of the vocabulary; ranks are summed."""
        w = self._weights
        if w.embedding_VH is None:
            raise RuntimeError("only the first stage embeds tokens")
        if self._group.size == 1:
            return functional.embedding(tokens_T, w.embedding_VH)
        local_T = tokens_T - w.vocab_start
        foreign_T = (local_T < 0) | (local_T >= w.embedding_VH.shape[0])
        x_TH = functional.embedding(local_T.masked_fill(foreign_T, 0), w.embedding_VH)
        return self._group.all_reduce(x_TH.masked_fill(foreign_T[:, None], 0.0))

    def layers(self, x_TH: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """All layers of this stage -> (x, residual), whose sum is the hidden state.

        x_TH may be overwritten.
        """
        if self._stack is not None:
            return self._stack(x_TH, None, batch)
        backend, eps, residual_TH = self._backend, self._eps, None
        for w, kv, shape in zip(self._weights.layers, self._kv, self._shapes, strict=True):
            if residual_TH is None:
                residual_TH = x_TH
                x_TH = backend.rms_norm(x_TH, w.input_norm_H, eps)
            else:
                x_TH = backend.add_rms_norm(x_TH, residual_TH, w.input_norm_H, eps)
            q_TND = backend.rope_and_cache(
                w.qkv(x_TH), self._weights.cos_sin_PD, batch, kv, shape, w.q_norm_D, w.k_norm_D, eps
            )
            x_TH = self._group.all_reduce(w.out(backend.attention(q_TND, batch, kv, shape)))
            x_TH = backend.add_rms_norm(x_TH, residual_TH, w.post_norm_H, eps)
            x_TH = self._group.all_reduce(w.down(backend.silu_mul(w.gate_up(x_TH))))
        if residual_TH is None:  # a stage without layers passes its input on
            return x_TH, torch.zeros_like(x_TH)
        return x_TH, residual_TH

    def final_norm(self, x_RH: torch.Tensor, residual_RH: torch.Tensor) -> torch.Tensor:
        """Norm of the hidden state of the rows asked for; overwrites residual_RH."""
        norm_H = self._weights.final_norm_H
        if norm_H is None:
            raise RuntimeError("only the last stage has the final norm")
        return self._backend.add_rms_norm(x_RH, residual_RH, norm_H, self._eps)

    def logits(self, normed_RH: torch.Tensor) -> torch.Tensor | None:
        """(R, vocabulary) float32 on rank 0, None on the others."""
        if self._weights.head is None:
            raise RuntimeError("only the last stage has the language-model head")
        local_RV = self._weights.head.unrounded(normed_RH)
        whole_RV = self._group.gather_columns(local_RV) if self._group.size > 1 else local_RV
        return None if whole_RV is None else whole_RV[:, : self._vocab_size].float()
