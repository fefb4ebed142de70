"""What the last stage makes of the hidden states: tokens, log-probabilities, embeddings.

The language-model head is the widest matrix of a small model, so it sees only the rows that are
asked for: one per sampling slice and draft, and prompt rows where prompt_logprobs are wanted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from actors.scheduling.plan import Slice, StepPlan, StepResult, TokenLogprobs
from actors.stage.cuda_graphs import StepOutput
from actors.stage.drafts import accept, drawing_rows
from actors.stage.host_batch import HostBatch
from actors.stage.input_batch import InputBatch
from actors.stage.models.decoder import Decoder
from actors.stage.rank_race import RankRace, race_alone
from actors.stage.sampler import Sampler
from actors.transport.group import RankGroup

# Prompt rows go through the head in pieces of this many: logits are vocabulary-wide float32.
_HEAD_ROWS = 256

PromptLogprobs = tuple[int, int, tuple[TokenLogprobs, ...]]
# Of each draw (request id, token), and of those that want it (request id, log-probabilities).
_Sampled = tuple[tuple[tuple[int, int], ...], tuple[tuple[int, TokenLogprobs], ...]]


@dataclass(slots=True)
class _Partial:
    """A request's running sum where its latest chunk starts and where it ends."""

    start: int
    sum_at_start_H: torch.Tensor
    end: int
    sum_at_end_H: torch.Tensor


class NotFinite(RuntimeError):
    """The step computed no numbers. It fails, so that the request that overflows is found and
    ended by itself, and none gets tokens drawn from nothing."""

    def __init__(self) -> None:
        super().__init__("the model's output is not finite: weights or activations overflow")


class Head:
    """Turns (x, residual) of the last stage into a StepResult. Every rank calls `finish`."""

    def __init__(
        self,
        decoder: Decoder,
        input_batch: InputBatch,
        sampler: Sampler | None,
        group: RankGroup,
        share_tokens: bool,
        race: RankRace,
    ) -> None:
        """sampler: on rank 0 only. share_tokens: this stage is also the first, so the other ranks
        need the sampled tokens. race: for where there are several ranks."""
        self._decoder = decoder
        self._input_batch = input_batch
        self._sampler = sampler
        self._group = group
        self._race = race
        self._share_tokens = share_tokens and group.size > 1
        self._partials: dict[int, _Partial] = {}  # of requests that pool by the mean

    def finish(self, plan: StepPlan, host: HostBatch, output: StepOutput) -> StepResult | None:
        """The step's result on rank 0, None on the others. Overwrites the output's residual.

        A captured step brings logits and tokens of every slice along.
        """
        columns, rows_S, samples_S = self._input_batch.columns, host.rows_S, host.samples_S
        prompts: tuple[PromptLogprobs, ...] = ()
        asking = np.flatnonzero(columns.prompt_logprobs_R[rows_S] >= 0)
        if asking.size:
            prompts = self._prompt_logprobs(asking.tolist(), plan.slices, host, output)
        pooled: tuple[tuple[int, tuple[float, ...]], ...] = ()
        pools_S = columns.pools_R[rows_S]
        if pools_S.any():
            pooled = self._pooled(np.flatnonzero(pools_S).tolist(), plan.slices, host, output)
            samples_S = samples_S & ~pools_S
        tokens: tuple[tuple[int, int], ...] = ()
        logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
        sampling = np.flatnonzero(samples_S)
        if sampling.size:
            last_rows = host.query_starts_S1[1:][sampling].astype(np.intp) - 1
            positions = host.ends_S[sampling].astype(np.int64)
            if plan.drafts:
                sampling, last_rows, positions = drawing_rows(plan, host, sampling)
            ids = [plan.slices[i].request_id for i in sampling.tolist()]
            if not output.headed:
                if len(last_rows) == len(output.x_TH):
                    normed_SH = self._decoder.final_norm(output.x_TH, output.residual_TH)
                else:
                    normed_SH = self._normed(output, last_rows)
                columns_SV = self._decoder.columns(normed_SH)
                tokens, logprobs = self._draw(ids, rows_S[sampling], positions, columns_SV)
            else:
                raw_SV = None if output.logits_SV is None else _rows(output.logits_SV, sampling)
                drawn_S = None if output.tokens_S is None else _rows(output.tokens_S, sampling)
                tokens, logprobs = self._sample(ids, rows_S[sampling], positions, raw_SV, drawn_S)
        if self._group.rank != 0:
            return None
        if plan.drafts:
            accepted = accept(plan.step_id, tokens, logprobs, dict(plan.drafts))
            return replace(accepted, prompt_logprobs=prompts, pooled=pooled)
        return StepResult(plan.step_id, tokens, logprobs, prompts, pooled)

    def release(self, request_ids: Sequence[int]) -> None:
        """Forget requests that left, or that start anew."""
        for request_id in request_ids:
            self._partials.pop(request_id, None)
        if self._sampler is not None and self._sampler.grammars.matchers:
            for request_id in request_ids:
                self._sampler.grammars.release(request_id)

    def _draw(
        self,
        ids: Sequence[int],
        rows_S: NDArray[np.intp],
        positions_S: NDArray[np.int64],
        columns_SV: torch.Tensor,
    ) -> _Sampled:
        """Ranks draw each in its own columns where they can, and gather the logits of the rest."""
        alone_S = np.zeros(len(rows_S), np.bool_)
        if self._group.size > 1:
            alone_S = race_alone(self._input_batch.columns, rows_S, positions_S)
        if not alone_S.any():
            return self._sample(ids, rows_S, positions_S, self._decoder.whole(columns_SV), None)
        alone, others = np.flatnonzero(alone_S), np.flatnonzero(~alone_S)
        drawn = self._race.draw(rows_S[alone], positions_S[alone], _rows(columns_SV, alone))
        if drawn[0] < 0:
            raise NotFinite
        tokens = dict(zip(alone.tolist(), drawn.tolist(), strict=True))
        logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
        if others.size:
            raw_SV = self._decoder.whole(_rows(columns_SV, others))
            sampled, logprobs = self._sample(
                [ids[i] for i in others.tolist()], rows_S[others], positions_S[others], raw_SV, None
            )
            tokens.update(zip(others.tolist(), (t for _, t in sampled), strict=True))
        self._input_batch.put_tokens(rows_S[alone], positions_S[alone], drawn)
        return tuple((request_id, tokens[i]) for i, request_id in enumerate(ids)), logprobs

    def _sample(
        self,
        ids: Sequence[int],
        rows_S: NDArray[np.intp],
        positions_S: NDArray[np.int64],
        raw_SV: torch.Tensor | None,
        ready_S: torch.Tensor | None,
    ) -> _Sampled:
        """Draw, share with the other ranks, and note the tokens in the persistent batch."""
        logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
        drawn_S = np.full(len(ids), -1, dtype=np.int64)
        try:
            if self._sampler is not None and raw_SV is not None:
                wanted = np.flatnonzero(self._input_batch.columns.logprobs_R[rows_S] >= 0)
                kept = raw_SV[torch.from_numpy(wanted)] if wanted.size else None
                drawn_S = self._sampler.tokens(rows_S, positions_S, raw_SV, ready_S)
                if not _are_finite(raw_SV, drawn_S):
                    drawn_S.fill(-1)
                    raise NotFinite
                if kept is not None:
                    counts = self._input_batch.columns.logprobs_R[rows_S[wanted]].tolist()
                    entries = self._sampler.logprobs(kept, drawn_S[wanted], counts)
                    logprobs = tuple(
                        (ids[i], entry) for i, entry in zip(wanted.tolist(), entries, strict=True)
                    )
        finally:
            # Also after a failure, with -1: the other ranks wait for this and must not hang.
            if self._share_tokens:
                shared_S = torch.from_numpy(drawn_S).to(self._decoder.device)
                drawn_S = self._group.broadcast(shared_S).cpu().numpy()
        if drawn_S[0] >= 0:
            self._input_batch.put_tokens(rows_S, positions_S, drawn_S)
        elif self._share_tokens:
            raise RuntimeError("rank 0 failed to sample")
        return tuple(zip(ids, drawn_S.tolist(), strict=True)), logprobs

    def _normed(self, output: StepOutput, rows: Iterable[int]) -> torch.Tensor:
        """Final norm of copies of some rows: the rows themselves may be needed again."""
        index = torch.from_numpy(np.fromiter(rows, np.int64)).to(output.x_TH.device)
        return self._decoder.final_norm(output.x_TH[index], output.residual_TH[index])

    def _prompt_logprobs(
        self, asking: Sequence[int], slices: Sequence[Slice], host: HostBatch, output: StepOutput
    ) -> tuple[PromptLogprobs, ...]:
        """Of the slices numbered in `asking`. The row of position p judges the token at p + 1."""
        found: list[PromptLogprobs] = []
        for i in asking:
            part, row, offset = slices[i], int(host.rows_S[i]), int(host.query_starts_S1[i])
            num_prompt = int(self._input_batch.columns.num_prompt_R[row])
            num_rows = min(part.num_tokens, num_prompt - 1 - part.start)
            count = int(self._input_batch.columns.prompt_logprobs_R[row])
            entries: list[TokenLogprobs] = []
            for begin in range(0, num_rows, _HEAD_ROWS):
                end = min(begin + _HEAD_ROWS, num_rows)
                at = range(offset + begin, offset + end)
                logits_RV = self._decoder.logits(self._normed(output, at))
                if self._sampler is not None and logits_RV is not None:
                    first = part.start + 1 + begin
                    targets = self._input_batch.tokens_RP[row, first : first + len(at)]
                    counts = [count] * len(at)
                    entries += self._sampler.logprobs(logits_RV, targets.astype(np.int64), counts)
            if any(math.isnan(entry.logprob) for entry in entries):
                raise NotFinite
            if num_rows > 0:
                found.append((part.request_id, part.start + 1, tuple(entries)))
        return tuple(found)

    def _pooled(
        self, pooling: Sequence[int], slices: Sequence[Slice], host: HostBatch, output: StepOutput
    ) -> tuple[tuple[int, tuple[float, ...]], ...]:
        """Embeddings of the requests whose prompt ends in this step; not normalised."""
        done: list[tuple[int, tuple[float, ...]]] = []
        for i in pooling:
            part, row = slices[i], int(host.rows_S[i])
            first, end = int(host.query_starts_S1[i]), int(host.query_starts_S1[i + 1])
            if self._input_batch.info(row).pooling == "last":
                vector_H = self._normed(output, (end - 1,))[0].float()
            else:
                vector_H = self._mean(part, self._normed(output, range(first, end)))
            if part.start + part.num_tokens >= self._input_batch.columns.num_prompt_R[row]:
                if not torch.isfinite(vector_H).all():
                    raise NotFinite
                done.append((part.request_id, tuple(vector_H.tolist())))
        return tuple(done)

    def _mean(self, part: Slice, normed_RH: torch.Tensor) -> torch.Tensor:
        """The mean from the first token to the end of this chunk, float32. A repeated chunk counts
        once. Raises ValueError where tokens before the chunk were never seen (a cached prefix).
        """
        sum_H = normed_RH.float().sum(0)
        partial = self._partials.get(part.request_id)
        if part.start == 0:
            before_H = torch.zeros_like(sum_H)
        elif partial is not None and partial.end == part.start:
            before_H = partial.sum_at_end_H
        elif partial is not None and partial.start == part.start:
            before_H = partial.sum_at_start_H
        else:
            raise ValueError(
                f"mean pooling of request {part.request_id} needs its tokens from the first on"
            )
        end = part.start + part.num_tokens
        total_H = before_H + sum_H
        self._partials[part.request_id] = _Partial(part.start, before_H, end, total_H)
        return total_H / end


def _are_finite(raw_SV: torch.Tensor, drawn_S: NDArray[np.int64]) -> bool:
    """Whether the rows of these logits are numbers, told by those of the drawn tokens: an overflow
    before the head makes every logit of its row infinite or none."""
    if drawn_S.min() < 0:  # a device that drew them has found out itself
        return False
    drawn = torch.from_numpy(drawn_S).to(raw_SV.device)
    return bool(torch.isfinite(raw_SV.gather(1, drawn[:, None])).all())


def _rows(values: torch.Tensor, rows: NDArray[np.intp]) -> torch.Tensor:
    """Some rows of a device tensor; the leading ones, the usual case, without a copy."""
    if rows[-1] == len(rows) - 1:
        return values[: len(rows)]
    return values[torch.from_numpy(rows).to(values.device)]
