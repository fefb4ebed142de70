"""What the last stage makes of the hidden states: tokens, log-probabilities, embeddings.

The language-model head is the widest matrix of a small model, so it sees only the rows that
somebody asked for: one per sampling slice, and prompt rows where prompt_logprobs are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from actors.scheduling.plan import Slice, StepPlan, StepResult, TokenLogprobs
from actors.stage.batch import BuiltBatch
from actors.stage.group import RankGroup
from actors.stage.models.decoder import Decoder
from actors.stage.sampler import Sampler, token_logprobs
from actors.stage.state import RequestState

# Prompt rows go through the head in pieces of this many: logits are vocabulary-wide float32.
_HEAD_ROWS = 256

PromptLogprobs = tuple[int, int, tuple[TokenLogprobs, ...]]


@dataclass(slots=True)
class _Pool:
    """A running sum over final-norm states, kept at the start and the end of the latest chunk so
    that a repeated chunk adds itself once."""

    start: int
    sum_at_start_H: torch.Tensor
    end: int
    sum_at_end_H: torch.Tensor


class Head:
    """Turns (x, residual) of the last stage into a StepResult. Every rank calls `finish`."""

    def __init__(
        self,
        decoder: Decoder,
        state: RequestState,
        sampler: Sampler | None,
        group: RankGroup,
        share_tokens: bool,
    ) -> None:
        """sampler: on rank 0 only. share_tokens: other ranks need what was sampled, because
        this stage is also the first."""
        self._decoder = decoder
        self._state = state
        self._sampler = sampler
        self._group = group
        self._share_tokens = share_tokens and group.size > 1
        self._pools: dict[int, _Pool] = {}

    def finish(
        self, plan: StepPlan, built: BuiltBatch, x_TH: torch.Tensor, residual_TH: torch.Tensor
    ) -> StepResult | None:
        """The step's answer on rank 0, None on the others."""
        offsets = built.geometry.query_starts_S1.tolist()
        prompts = self._prompt_logprobs(plan.slices, offsets, x_TH, residual_TH)
        pooled = self._pooled(plan.slices, offsets, x_TH, residual_TH)
        sampling = [
            i
            for i, s in enumerate(plan.slices)
            if s.samples and self._state.info(s.request_id).pooling is None
        ]
        tokens: tuple[tuple[int, int], ...] = ()
        logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
        if sampling:
            slices = [plan.slices[i] for i in sampling]
            rows = [offsets[i + 1] - 1 for i in sampling]
            raw_SV = self._logits(x_TH, residual_TH, rows)
            tokens, logprobs = self._sample(slices, raw_SV)
        if self._group.rank != 0:
            return None
        return StepResult(plan.step_id, tokens, logprobs, tuple(prompts), pooled)

    def release(self, request_id: int) -> None:
        self._pools.pop(request_id, None)
        if self._sampler is not None:
            self._sampler.grammars.release(request_id)

    def clear(self) -> None:
        self._pools.clear()
        if self._sampler is not None:
            self._sampler.grammars.clear()

    def _sample(
        self, slices: Sequence[Slice], raw_SV: torch.Tensor | None
    ) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, TokenLogprobs], ...]]:
        logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
        shared_S = torch.full((len(slices),), -1, dtype=torch.int64, device=self._decoder.device)
        try:
            if self._sampler is not None and raw_SV is not None:
                asks = any(
                    self._state.info(s.request_id).sampling.logprobs is not None for s in slices
                )
                drawn_S = self._sampler.tokens(slices, raw_SV.clone() if asks else raw_SV)
                if asks:
                    logprobs = self._sampler.logprobs(slices, raw_SV, drawn_S)
                shared_S.copy_(torch.from_numpy(np.ascontiguousarray(drawn_S)))
        finally:
            # Also after a failure, with -1: the other ranks wait for this and must not hang.
            if self._share_tokens:
                self._group.broadcast(shared_S)
        ids = shared_S.tolist()
        if self._share_tokens and ids[0] < 0:
            raise RuntimeError("rank 0 failed to sample")
        for s, token in zip(slices, ids, strict=True):
            if token >= 0:
                self._state.put_token(s.request_id, s.start + s.num_tokens, token)
        return tuple((s.request_id, t) for s, t in zip(slices, ids, strict=True)), logprobs

    def _logits(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, rows: Sequence[int]
    ) -> torch.Tensor | None:
        return self._decoder.logits(self._normed(x_TH, residual_TH, rows))

    def _normed(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, rows: Sequence[int]
    ) -> torch.Tensor:
        """Final norm of some rows. The rows are copies: others may ask for the same again."""
        at = torch.tensor(rows, device=x_TH.device)
        return self._decoder.final_norm(x_TH[at], residual_TH[at])

    def _prompt_logprobs(
        self,
        slices: Sequence[Slice],
        offsets: Sequence[int],
        x_TH: torch.Tensor,
        residual_TH: torch.Tensor,
    ) -> list[PromptLogprobs]:
        """Row of position p judges the prompt token at p + 1."""
        found: list[PromptLogprobs] = []
        for i, piece in enumerate(slices):
            info = self._state.info(piece.request_id)
            count = info.sampling.prompt_logprobs
            num_rows = min(piece.num_tokens, info.num_prompt_tokens - 1 - piece.start)
            if count is None or num_rows <= 0:
                continue
            row = self._state.row(piece.request_id)
            first = piece.start + 1
            entries: list[TokenLogprobs] = []
            for done in range(0, num_rows, _HEAD_ROWS):
                piece_rows = range(done, min(done + _HEAD_ROWS, num_rows))
                rows = [offsets[i] + r for r in piece_rows]
                logits_RV = self._logits(x_TH, residual_TH, rows)
                if logits_RV is None:
                    continue
                begin = first + done
                targets = self._state.tokens_RP[row, begin : begin + len(rows)]
                entries += token_logprobs(logits_RV, targets.astype(np.int64), [count] * len(rows))
            found.append((piece.request_id, first, tuple(entries)))
        return found

    def _pooled(
        self,
        slices: Sequence[Slice],
        offsets: Sequence[int],
        x_TH: torch.Tensor,
        residual_TH: torch.Tensor,
    ) -> tuple[tuple[int, tuple[float, ...]], ...]:
        """Embeddings of the requests whose prompt ends in this step; not normalised."""
        done: list[tuple[int, tuple[float, ...]]] = []
        for i, piece in enumerate(slices):
            info = self._state.info(piece.request_id)
            if info.pooling is None:
                continue
            end = piece.start + piece.num_tokens
            is_end = end >= info.num_prompt_tokens
            if info.pooling == "last":
                if is_end:
                    normed_RH = self._normed(x_TH, residual_TH, [offsets[i + 1] - 1])
                    done.append((piece.request_id, tuple(normed_RH[0].float().tolist())))
                continue
            rows = range(offsets[i], offsets[i + 1])
            sum_H = self._normed(x_TH, residual_TH, rows).float().sum(0)
            total_H = self._accumulate(piece, sum_H)
            if is_end:
                done.append((piece.request_id, tuple((total_H / end).tolist())))
        return tuple(done)

    def _accumulate(self, piece: Slice, sum_H: torch.Tensor) -> torch.Tensor:
        pool = self._pools.get(piece.request_id)
        if piece.start == 0:
            before_H = torch.zeros_like(sum_H)
        elif pool is not None and pool.end == piece.start:
            before_H = pool.sum_at_end_H
        elif pool is not None and pool.start == piece.start:
            before_H = pool.sum_at_start_H
        else:
            raise ValueError(
                f"mean pooling of request {piece.request_id} needs its tokens from the first on"
            )
        total_H = before_H + sum_H
        end = piece.start + piece.num_tokens
        self._pools[piece.request_id] = _Pool(piece.start, before_H, end, total_H)
        return total_H
