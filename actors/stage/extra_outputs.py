"""Outputs of a step besides tokens, on request: log-probabilities and embeddings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from actors.scheduling.plan import Slice, SliceRow, StepResult, TokenLogprobs
from actors.stage.cuda.graphs import StepOutput
from actors.stage.host_batch import HostBatch
from actors.stage.input_batch import InputBatch
from actors.stage.models.decoder import Decoder
from kernels.interface import Backend
from kernels.sampling import ChosenLogprobs

# Prompt rows go through the head in pieces of this many: logits are vocabulary-wide float32.
_HEAD_ROWS = 256

PromptLogprobs = tuple[int, int, tuple[TokenLogprobs, ...]]
Pooled = tuple[int, tuple[float, ...]]


class NotFinite(RuntimeError):
    """An embedding or the log-probabilities of a prompt are not finite. The step fails, so that the
    overflowing request is isolated and ended."""

    def __init__(self) -> None:
        super().__init__("the model's output is not finite: weights or activations overflow")


@dataclass(slots=True)
class _Partial:
    """A request's running sum where its latest chunk starts and where it ends."""

    start: int
    sum_at_start_H: torch.Tensor
    end: int
    sum_at_end_H: torch.Tensor


class PromptOutputs:
    """Outputs of prompts, on the last stage. Every rank calls the same methods; only rank 0 returns
    `prompt_logprobs`, not finite where the logits are not."""

    def __init__(self, decoder: Decoder, input_batch: InputBatch, backend: Backend) -> None:
        self._decoder = decoder
        self._input_batch = input_batch
        self._backend = backend
        self.partials: dict[int, _Partial] = {}  # of requests that pool by the mean

    def prompt_logprobs(
        self, asking: Sequence[int], slices: Sequence[SliceRow], host: HostBatch, output: StepOutput
    ) -> tuple[PromptLogprobs, ...]:
        """For the slices numbered in `asking`. The row of position p judges the token at p + 1."""
        found: list[PromptLogprobs] = []
        for i in asking:
            part, row, offset = Slice(*slices[i]), int(host.rows_S[i]), int(host.query_starts_S1[i])
            num_prompt = int(self._input_batch.columns.num_prompt_R[row])
            num_rows = min(part.num_tokens, num_prompt - 1 - part.start)
            count = int(self._input_batch.columns.prompt_logprobs_R[row])
            entries: list[TokenLogprobs] = []
            for begin in range(0, num_rows, _HEAD_ROWS):
                end = min(begin + _HEAD_ROWS, num_rows)
                at = range(offset + begin, offset + end)
                normed_RH = self._decoder.final_norm_of(output.x_TH, output.residual_TH, at)
                logits_RV = self._decoder.logits(normed_RH)
                if logits_RV is not None:
                    first = part.start + 1 + begin
                    targets_R = self._input_batch.tokens_RP[row, first : first + len(at)]
                    tokens_R = targets_R.astype(np.int64)
                    counts = [count] * len(at)
                    entries += token_logprobs(self._backend, logits_RV, tokens_R, counts)
            if num_rows > 0:
                found.append((part.request_id, part.start + 1, tuple(entries)))
        return tuple(found)

    def pooled(
        self,
        pooling: Sequence[int],
        slices: Sequence[SliceRow],
        host: HostBatch,
        output: StepOutput,
    ) -> tuple[Pooled, ...]:
        """Embeddings of the requests whose prompt ends in this step; not normalized."""

        def normed(rows: Iterable[int]) -> torch.Tensor:
            return self._decoder.final_norm_of(output.x_TH, output.residual_TH, rows)

        done: list[Pooled] = []
        for i in pooling:
            part, row = Slice(*slices[i]), int(host.rows_S[i])
            first, end = int(host.query_starts_S1[i]), int(host.query_starts_S1[i + 1])
            if self._input_batch.info(row).pooling == "last":
                vector_H = normed((end - 1,))[0].float()
            else:
                vector_H = self._mean(part, normed(range(first, end)))
            if part.start + part.num_tokens >= self._input_batch.columns.num_prompt_R[row]:
                if not torch.isfinite(vector_H).all():
                    raise NotFinite
                done.append((part.request_id, tuple(vector_H.tolist())))
        return tuple(done)

    def _mean(self, part: Slice, normed_RH: torch.Tensor) -> torch.Tensor:
        """The mean from the first token to the end of this chunk, float32. A repeated chunk counts
        once. Raises ValueError where tokens before the chunk were never seen (a cached prefix).

        Summed in order and in float64, so that chunks change nothing of it on CPUs.
        """
        partial = self.partials.get(part.request_id)
        if part.start == 0:
            before_H = normed_RH.new_zeros(normed_RH.shape[1], dtype=torch.float64)
        elif partial is not None and partial.end == part.start:
            before_H = partial.sum_at_end_H
        elif partial is not None and partial.start == part.start:
            before_H = partial.sum_at_start_H
        else:
            raise ValueError(
                f"mean pooling of request {part.request_id} needs its tokens from the first on"
            )
        end = part.start + part.num_tokens
        total_H = torch.cat((before_H[None], normed_RH.double())).cumsum(0)[-1]
        self.partials[part.request_id] = _Partial(part.start, before_H, end, total_H)
        return (total_H / end).float()


def with_prompts(
    result: StepResult, prompts: tuple[PromptLogprobs, ...], pooled: tuple[Pooled, ...]
) -> StepResult:
    """The result with outputs of prompts. Raises NotFinite for log-probabilities that are not: only
    now, as rank 0 alone has them, and the others would have waited for it in the draw."""
    if any(math.isnan(entry.logprob) for *_, entries in prompts for entry in entries):
        raise NotFinite
    return replace(result, prompt_logprobs=prompts, pooled=pooled)


def token_logprobs(
    backend: Backend, logits_RV: torch.Tensor, tokens_R: NDArray[np.int64], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """Log-probabilities of one token per row of unadjusted logits, with counts[row] alternatives
    each."""
    tokens = torch.from_numpy(np.ascontiguousarray(tokens_R)).to(logits_RV.device)
    return as_logprobs(tokens_R, backend.chosen_logprobs(logits_RV, tokens, max(counts)), counts)


def as_logprobs(
    tokens_R: NDArray[np.int64], logprobs: ChosenLogprobs, counts: Sequence[int]
) -> list[TokenLogprobs]:
    """The results, per token, with counts[row] alternatives."""
    chosen_R, rank_R, top_RK, ids_RK = logprobs
    return [
        TokenLogprobs(
            token=int(tokens_R[r]),
            logprob=float(chosen_R[r]),
            rank=int(rank_R[r]),
            top=tuple(zip(ids_RK[r, :count].tolist(), top_RK[r, :count].tolist(), strict=True)),
        )
        for r, count in enumerate(counts)
    ]
