"""The last stage's head: from hidden states to logits, and to tokens by each request's parameters.

The language-model head is the widest matrix of a small model, so it sees only the rows that are
asked for: one per sampling slice and draft, and prompt rows where prompt_logprobs are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from actors.scheduling.plan import StepPlan, StepResult, TokenLogprobs
from actors.stage.cuda.graphs import StepOutput
from actors.stage.drafts import DraftOrder, accept, draws_of
from actors.stage.extra_outputs import (
    Pooled,
    PromptLogprobs,
    PromptOutputs,
    token_logprobs,
    with_prompts,
)
from actors.stage.grammars.masks import GrammarMasks
from actors.stage.host_batch import HostBatch
from actors.stage.input_batch import Columns, InputBatch
from actors.stage.landing import await_queue
from actors.stage.models.decoder import Decoder
from actors.stage.vocab_parallel import DRAW_FAILED, VocabParallelSampler
from actors.transport.group import RankGroup
from kernels.interface import Backend
from kernels.sampling import Adjustment
from kernels.token_counts import TokenCounts

# (request id, token) of each draw, and (request id, log-probabilities) of those that request them.
_Sampled = tuple[tuple[tuple[int, int], ...], tuple[tuple[int, TokenLogprobs], ...]]


class Head:
    """Turns (x, residual) of the last stage into a StepResult. Every rank calls `finish`."""

    def __init__(
        self,
        decoder: Decoder,
        input_batch: InputBatch,
        sampler: Sampler | None,
        backend: Backend,
        group: RankGroup,
        share_tokens: bool,
    ) -> None:
        """sampler: on rank 0 only. share_tokens: this stage is also the first, so the other ranks
        need the sampled tokens."""
        self._decoder = decoder
        self._input_batch = input_batch
        self._sampler = sampler
        self._group = group
        # Where there are several ranks.
        self._vocab_parallel = VocabParallelSampler(decoder, backend, input_batch, group)
        self._share_tokens = share_tokens and group.size > 1
        self._backend = backend
        self._prompts = PromptOutputs(decoder, input_batch, backend)

    def finish(self, plan: StepPlan, host: HostBatch, output: StepOutput) -> StepResult | None:
        """The result, on rank 0, of a step that was not captured; None on the others. Overwrites
        the output's residual."""
        # Before the sampled rows: their norm overwrites the residual.
        prompts, pooled = self.prompt_outputs(plan, host, output)
        tokens, logprobs = self._next_tokens(plan, host, output)
        if not tokens:
            # No draw has waited for the device. But an answer says that the step's KV may be read,
            # by other streams too, and how long the step took.
            await_queue(self._decoder.device)
        if self._group.rank != 0:
            return None
        result = StepResult(plan.step_id, tokens, logprobs)
        if plan.drafts:
            result = accept(plan.step_id, tokens, logprobs, dict(plan.drafts))
        return with_prompts(result, prompts, pooled) if prompts or pooled else result

    def prompt_outputs(
        self, plan: StepPlan, host: HostBatch, output: StepOutput
    ) -> tuple[tuple[PromptLogprobs, ...], tuple[Pooled, ...]]:
        """What is asked of the step's prompt rows, for `with_prompts`; waits for the device where
        something is. Every rank calls it."""
        columns = self._input_batch.columns
        prompts: tuple[PromptLogprobs, ...] = ()
        asking = np.flatnonzero(columns.prompt_logprobs_R[host.rows_S] >= 0)
        if asking.size:
            prompts = self._prompts.prompt_logprobs(asking.tolist(), plan.slices, host, output)
        pooled: tuple[Pooled, ...] = ()
        pooling = np.flatnonzero(columns.pools_R[host.rows_S])
        if pooling.size:
            pooled = self._prompts.pooled(pooling.tolist(), plan.slices, host, output)
        return prompts, pooled

    def _next_tokens(self, plan: StepPlan, host: HostBatch, output: StepOutput) -> _Sampled:
        """A draw for each slice that samples, and for each of its drafts."""
        draws = draws_of(plan, host)
        if not draws.slices_N.size:
            return (), ()
        ids = [plan.slices[i][0] for i in draws.slices_N.tolist()]
        if len(draws.rows_N) == len(output.x_TH):
            normed_SH = self._decoder.final_norm(output.x_TH, output.residual_TH)
        else:
            normed_SH = self._decoder.final_norm_of(output.x_TH, output.residual_TH, draws.rows_N)
        sharded_SV = self._decoder.sharded_logits(normed_SH)
        return self._draw(ids, host.rows_S[draws.slices_N], draws.positions_N, sharded_SV)

    def release(self, request_ids: Sequence[int]) -> None:
        """Forget requests that have left or start again."""
        for request_id in request_ids:
            self._prompts.partials.pop(request_id, None)
        if self._sampler is not None:
            self._sampler.release(request_ids)

    def _draw(
        self,
        ids: Sequence[int],
        rows_S: NDArray[np.intp],
        positions_S: NDArray[np.int64],
        sharded_SV: torch.Tensor,
    ) -> _Sampled:
        """Each rank draws from its own shard where that is enough; the logits of the rest are
        gathered."""
        alone_S = np.zeros(len(rows_S), np.bool_)
        if self._group.size > 1:
            alone_S = samples_locally(self._input_batch.columns, rows_S, positions_S)
        if not alone_S.any():
            raw_SV = self._decoder.gather_logits(sharded_SV)
            return self._sample(ids, rows_S, positions_S, raw_SV)
        alone, others = np.flatnonzero(alone_S), np.flatnonzero(~alone_S)
        drawn = self._vocab_parallel.draw(
            rows_S[alone], positions_S[alone], _rows(sharded_SV, alone)
        )
        tokens = dict(zip(alone.tolist(), drawn.tolist(), strict=True))
        logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
        if others.size:
            raw_SV = self._decoder.gather_logits(_rows(sharded_SV, others))
            sampled, logprobs = self._sample(
                [ids[i] for i in others.tolist()], rows_S[others], positions_S[others], raw_SV
            )
            tokens.update(zip(others.tolist(), (t for _, t in sampled), strict=True))
        self._input_batch.put_tokens(rows_S[alone], positions_S[alone], drawn.clip(min=0))
        return tuple((request_id, tokens[i]) for i, request_id in enumerate(ids)), logprobs

    def _sample(
        self,
        ids: Sequence[int],
        rows_S: NDArray[np.intp],
        positions_S: NDArray[np.int64],
        raw_SV: torch.Tensor | None,
    ) -> _Sampled:
        """Draw, share with the other ranks, and note the tokens in the persistent batch."""
        logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
        drawn_S = np.full(len(ids), DRAW_FAILED, dtype=np.int64)
        try:
            if self._sampler is not None and raw_SV is not None:
                wanted = np.flatnonzero(self._input_batch.columns.logprobs_R[rows_S] >= 0)
                kept = raw_SV[torch.from_numpy(wanted)] if wanted.size else None
                drawn_S = self._sampler.tokens(rows_S, positions_S, raw_SV)
                if kept is not None:
                    counts = self._input_batch.columns.logprobs_R[rows_S[wanted]].tolist()
                    chosen_R = drawn_S[wanted].clip(min=0)
                    entries = token_logprobs(self._backend, kept, chosen_R, counts)
                    logprobs = tuple(
                        (ids[i], entry) for i, entry in zip(wanted.tolist(), entries, strict=True)
                    )
        finally:
            # Also after a failure: the other ranks wait for this and must not hang.
            if self._share_tokens:
                shared_S = torch.from_numpy(drawn_S).to(self._decoder.device)
                drawn_S = self._group.broadcast(shared_S).cpu().numpy()
        if drawn_S[0] != DRAW_FAILED:
            # A step in flight after this one reads these as token ids.
            self._input_batch.put_tokens(rows_S, positions_S, drawn_S.clip(min=0))
        elif self._share_tokens:
            raise RuntimeError("rank 0 failed to sample")
        return tuple(zip(ids, drawn_S.tolist(), strict=True)), logprobs


class Sampler:
    """Adjusts logits, draws, and keeps the grammars of constrained requests."""

    def __init__(
        self,
        input_batch: InputBatch,
        backend: Backend,
        folder: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._input_batch = input_batch
        self._backend = backend
        self._vocab_size = vocab_size
        self.grammars = GrammarMasks(folder, vocab_size, eos_token_ids)
        self._counts: dict[int, TokenCounts] = {}  # of requests with penalties

    def release(self, request_ids: Sequence[int]) -> None:
        """Forget requests that have left or start again."""
        for request_id in request_ids:
            self._counts.pop(request_id, None)
            self.grammars.matchers.pop(request_id, None)

    def tokens(
        self,
        rows_S: NDArray[np.intp],
        positions_S: NDArray[np.int64],
        logits_SV: torch.Tensor,
    ) -> NDArray[np.int64]:
        """One token per row for its position, -1 where it is not finite, `DEAD_END` or
        `SLOW_GRAMMAR` where its grammar gives none; float32 logits are adjusted in place."""
        columns = self._input_batch.columns
        changed = adjusted(columns, rows_S, positions_S)
        if not changed.size:
            return self._backend.sample(logits_SV, columns.draws(rows_S, positions_S))
        without = self.adjust(logits_SV, rows_S, positions_S, changed)
        drawn_S = self._backend.sample(logits_SV, columns.draws(rows_S, positions_S))
        for s, why in without.items():
            drawn_S[s] = why
        return drawn_S

    def forced(self, asked: Sequence[DraftOrder]) -> dict[int, tuple[int, ...]]:
        """What the grammars of these requests let follow, where it is a single text."""
        if not self.grammars.matchers:
            return {}
        found = {}
        for request_id, last, count in asked:
            row = self._input_batch.row(request_id)
            grammar = self._input_batch.info(row).sampling.grammar
            if grammar is not None:
                begin = int(self._input_batch.columns.num_prompt_R[row])
                output = self._input_batch.tokens_RP[row, begin : last + 1]
                found[request_id] = self.grammars.forced(request_id, grammar, output, count)
        return {request_id: tokens for request_id, tokens in found.items() if tokens}

    def adjust(
        self,
        logits_SV: torch.Tensor,
        rows_S: NDArray[np.intp],
        positions_S: NDArray[np.int64],
        which: NDArray[np.intp],
    ) -> dict[int, int]:
        """Adjust in place the logits of those draws that `which` numbers; returns those whose
        grammar gives no token, with what stands in its place."""
        held_back_S = held_back(self._input_batch.columns, rows_S, positions_S)
        adjustments = [
            self._adjustment(s, int(rows_S[s]), int(positions_S[s]), bool(held_back_S[s]))
            for s in which.tolist()
        ]
        self._backend.adjust_logits(logits_SV, adjustments)
        masks = ((a.row, a.allowed_W) for a in adjustments)
        nothing = [s for s, m in masks if m is not None and not self.grammars.allows_some(m)]
        ids = (self._input_batch.info(row).request_id for row in rows_S[nothing].tolist())
        return dict(zip(nothing, map(self.grammars.why_nothing, ids), strict=True))

    def _adjustment(self, s: int, row: int, position: int, held_back: bool) -> Adjustment:
        info, p = self._input_batch.info(row), self._input_batch.info(row).sampling
        num_prompt = int(self._input_batch.columns.num_prompt_R[row])
        tokens = self._input_batch.tokens_RP[row, :position]
        output, vocabulary = tokens[num_prompt:], self._vocab_size
        return Adjustment(
            row=s,
            prompt=tokens[:num_prompt],
            output=output,
            bias=tuple((t, b) for t, b in p.logit_bias if 0 <= t < vocabulary),
            repetition_penalty=p.repetition_penalty,
            presence_penalty=p.presence_penalty,
            frequency_penalty=p.frequency_penalty,
            forbidden=tuple(t for t in p.stop_token_ids if held_back and 0 <= t < vocabulary),
            allowed_W=self.grammars.mask(info.request_id, p.grammar, output)
            if p.grammar is not None
            else None,
            counts=self._counts.setdefault(info.request_id, TokenCounts()),
        )


def held_back(
    columns: Columns, rows_S: NDArray[np.intp], positions_S: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Draws for which stop tokens are still forbidden (`min_tokens`)."""
    held_back_S: NDArray[np.bool_] = (
        positions_S - columns.num_prompt_R[rows_S] < columns.min_tokens_R[rows_S]
    )
    return held_back_S


def adjusted(
    columns: Columns, rows_S: NDArray[np.intp], positions_S: NDArray[np.int64]
) -> NDArray[np.intp]:
    """Which of these draws are from adjusted logits."""
    return np.flatnonzero(held_back(columns, rows_S, positions_S) | columns.adjusts_R[rows_S])


def samples_locally(
    columns: Columns, rows_S: NDArray[np.intp], positions_S: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which draws need no more than each rank's own logits: the same on every rank."""
    alone_S: NDArray[np.bool_] = ~(
        columns.adjusts_R[rows_S]
        | held_back(columns, rows_S, positions_S)
        | (columns.top_k_R[rows_S] > 0)
        | (columns.top_p_R[rows_S] < 1)
        | (columns.min_p_R[rows_S] > 0)
        | (columns.logprobs_R[rows_S] >= 0)
    )
    return alone_S


def _rows(values: torch.Tensor, rows: NDArray[np.intp]) -> torch.Tensor:
    """Some rows of a device tensor; the leading ones, the usual case, without a copy."""
    if rows[-1] == len(rows) - 1:
        return values[: len(rows)]
    return values[torch.from_numpy(rows).to(values.device)]
