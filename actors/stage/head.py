"""What the last stage makes of the hidden states: tokens, log-probabilities, embeddings.

The language-model head is the widest matrix of a small model, so it sees only the rows that
somebody asked for: one per sampling slice, and prompt rows where prompt_logprobs are wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from actors.scheduling.plan import Slice, StepPlan, StepResult, TokenLogprobs
from actors.stage.batch import HostBatch
from actors.stage.cuda_graphs import StepOutput
from actors.stage.group import RankGroup
from actors.stage.input_batch import RequestState
from actors.stage.models.decoder import Decoder
from actors.stage.pooling import Pools
from actors.stage.sampler import Sampler

# Prompt rows go through the head in pieces of this many: logits are vocabulary-wide float32.
_HEAD_ROWS = 256

PromptLogprobs = tuple[int, int, tuple[TokenLogprobs, ...]]


@dataclass(slots=True)
class _Hidden:
    """The stage's output; its rows belong to slice i from offsets_S1[i] to offsets_S1[i + 1]."""

    x_TH: torch.Tensor
    residual_TH: torch.Tensor
    offsets_S1: NDArray[np.int32]


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
        self._pools = Pools()

    def finish(self, plan: StepPlan, built: HostBatch, output: StepOutput) -> StepResult | None:
        """The step's answer on rank 0, None on the others. Overwrites the output's residual.

        A captured step brings logits and tokens of every slice along; tokens alone where nobody
        asks for more.
        """
        if output.logits_SV is None and output.tokens_S is not None:
            return self._note_tokens(plan, built, output.tokens_S)
        slices, columns = plan.slices, self._state.columns
        hidden = _Hidden(output.x_TH, output.residual_TH, built.offsets_S1)
        rows_S = built.rows_S
        asking = np.flatnonzero(columns.prompt_logprobs_R[rows_S] >= 0).tolist()
        prompts = self._prompt_logprobs([(i, slices[i]) for i in asking], rows_S, hidden)
        pooling = np.flatnonzero(columns.pools_R[rows_S]).tolist()
        pooled = self._pooled([(i, slices[i]) for i in pooling], rows_S, hidden)
        samples_S = built.samples_S
        if pooling:
            samples_S = samples_S & ~columns.pools_R[rows_S]
        tokens: tuple[tuple[int, int], ...] = ()
        logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
        sampling = np.flatnonzero(samples_S)
        if sampling.size:
            last_rows = built.offsets_S1[1:][sampling] - 1
            positions = built.ends_S[sampling].astype(np.int64)
            ids = [slices[i].request_id for i in sampling.tolist()]
            drawn_S = None
            if output.logits_SV is None:
                raw_SV = self._decoder.logits(self._normed(hidden, last_rows, final=True))
            else:
                raw_SV = _rows(output.logits_SV, sampling)
                drawn_S = None if output.tokens_S is None else _rows(output.tokens_S, sampling)
            tokens, logprobs = self._sample(ids, rows_S[sampling], positions, raw_SV, drawn_S)
        if self._group.rank != 0:
            return None
        return StepResult(plan.step_id, tokens, logprobs, prompts, pooled)

    def _note_tokens(self, plan: StepPlan, built: HostBatch, tokens_S: torch.Tensor) -> StepResult:
        """The answer of a step that was drawn on the device and wants nothing else."""
        sampling = np.flatnonzero(built.samples_S)
        drawn_S = tokens_S.numpy()[sampling].astype(np.int64)
        positions_S = built.ends_S[sampling].astype(np.int64)
        self._state.put_tokens(built.rows_S[sampling], positions_S, drawn_S)
        ids = [plan.slices[i].request_id for i in sampling.tolist()]
        return StepResult(plan.step_id, tuple(zip(ids, drawn_S.tolist(), strict=True)))

    def release(self, request_id: int) -> None:
        self._pools.release(request_id)
        if self._sampler is not None:
            self._sampler.grammars.release(request_id)

    def clear(self) -> None:
        self._pools.clear()
        if self._sampler is not None:
            self._sampler.grammars.clear()

    def _sample(
        self,
        ids: Sequence[int],
        rows_S: NDArray[np.intp],
        positions_S: NDArray[np.int64],
        raw_SV: torch.Tensor | None,
        ready_S: torch.Tensor | None,
    ) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, TokenLogprobs], ...]]:
        """Draw, share with the other ranks, and note the tokens in the mirrored state."""
        logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
        drawn_S = np.full(len(ids), -1, dtype=np.int64)
        try:
            if self._sampler is not None and raw_SV is not None:
                wanted = np.flatnonzero(self._state.columns.logprobs_R[rows_S] >= 0)
                kept = raw_SV[torch.from_numpy(wanted)] if wanted.size else None
                drawn_S = self._sampler.tokens(rows_S, positions_S, raw_SV, ready_S)
                if kept is not None:
                    counts = self._state.columns.logprobs_R[rows_S[wanted]].tolist()
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
            self._state.put_tokens(rows_S, positions_S, drawn_S)
        elif self._share_tokens:
            raise RuntimeError("rank 0 failed to sample")
        return tuple(zip(ids, drawn_S.tolist(), strict=True)), logprobs

    def _normed(self, hidden: _Hidden, rows: Iterable[int], final: bool = False) -> torch.Tensor:
        """Final norm of some rows. They are copied, for others may ask for them again, unless
        this is the final use and wants all of them."""
        at = np.fromiter(rows, np.int64)
        if final and len(at) == len(hidden.x_TH):
            return self._decoder.final_norm(hidden.x_TH, hidden.residual_TH)
        index = torch.from_numpy(at).to(hidden.x_TH.device)
        return self._decoder.final_norm(hidden.x_TH[index], hidden.residual_TH[index])

    def _prompt_logprobs(
        self, asking: Iterable[tuple[int, Slice]], rows_S: NDArray[np.intp], hidden: _Hidden
    ) -> tuple[PromptLogprobs, ...]:
        """The row of position p judges the prompt token at p + 1."""
        found: list[PromptLogprobs] = []
        for i, piece in asking:
            row = int(rows_S[i])
            num_prompt = int(self._state.columns.num_prompt_R[row])
            num_rows = min(piece.num_tokens, num_prompt - 1 - piece.start)
            count = int(self._state.columns.prompt_logprobs_R[row])
            entries: list[TokenLogprobs] = []
            for begin in range(0, num_rows, _HEAD_ROWS):
                end = min(begin + _HEAD_ROWS, num_rows)
                at = range(int(hidden.offsets_S1[i]) + begin, int(hidden.offsets_S1[i]) + end)
                logits_RV = self._decoder.logits(self._normed(hidden, at))
                if self._sampler is not None and logits_RV is not None:
                    first = piece.start + 1 + begin
                    targets = self._state.tokens_RP[row, first : first + len(at)]
                    counts = [count] * len(at)
                    entries += self._sampler.logprobs(logits_RV, targets.astype(np.int64), counts)
            if num_rows > 0:
                found.append((piece.request_id, piece.start + 1, tuple(entries)))
        return tuple(found)

    def _pooled(
        self, pooling: Iterable[tuple[int, Slice]], rows_S: NDArray[np.intp], hidden: _Hidden
    ) -> tuple[tuple[int, tuple[float, ...]], ...]:
        """Embeddings of the requests whose prompt ends in this step; not normalised."""
        done: list[tuple[int, tuple[float, ...]]] = []
        for i, piece in pooling:
            row = int(rows_S[i])
            first, end = int(hidden.offsets_S1[i]), int(hidden.offsets_S1[i + 1])
            if self._state.info(row).pooling == "last":
                vector_H = self._normed(hidden, (end - 1,))[0].float()
            else:
                vector_H = self._pools.mean(piece, self._normed(hidden, range(first, end)))
            if piece.start + piece.num_tokens >= self._state.columns.num_prompt_R[row]:
                done.append((piece.request_id, tuple(vector_H.tolist())))
        return tuple(done)


def _rows(values: torch.Tensor, rows: NDArray[np.intp]) -> torch.Tensor:
    """Some rows of a device tensor; the leading ones, the usual case, without a copy."""
    if rows[-1] == len(rows) - 1:
        return values[: len(rows)]
    return values[torch.from_numpy(rows).to(values.device)]
