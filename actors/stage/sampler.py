"""Drawing tokens from logits by the parameters of each request, on rank 0 of the last stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from actors.scheduling.plan import StepResult, TokenLogprobs
from actors.stage.grammar import GrammarMasks
from actors.stage.input_batch import InputBatch
from kernels.interface import Backend
from kernels.torch_sampling import Adjustment, Judged


class Sampler:
    """Adjusts logits, draws, and keeps the grammars of constrained requests."""

    def __init__(
        self,
        input_batch: InputBatch,
        backend: Backend,
        folder: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        forces: bool = False,
    ) -> None:
        """forces: say what grammars force, to be drafted."""
        self.forces = forces
        self._input_batch = input_batch
        self._backend = backend
        self._vocab_size = vocab_size
        self.grammars = GrammarMasks(folder, vocab_size, eos_token_ids)

    def tokens(
        self,
        rows_S: NDArray[np.intp],
        positions_S: NDArray[np.int64],
        logits_SV: torch.Tensor,
        ready_S: torch.Tensor | None = None,
    ) -> NDArray[np.int64]:
        """One token per row for its position; float32 logits are adjusted in place.

        ready_S: tokens that the device has drawn from the logits as they are.
        """
        adjusted = self.adjusted(rows_S, positions_S)
        if adjusted.size:
            self.adjust(logits_SV, rows_S, positions_S, adjusted)
        elif ready_S is not None:
            ready: NDArray[np.int64] = ready_S.cpu().numpy().astype(np.int64)
            return ready
        columns = self._input_batch.columns
        return self._backend.sample(logits_SV, columns.draws(rows_S, positions_S))

    def adjusted(
        self, rows_S: NDArray[np.intp], positions_S: NDArray[np.int64]
    ) -> NDArray[np.intp]:
        """Which of these draws are from adjusted logits."""
        columns = self._input_batch.columns
        return np.flatnonzero(columns.held_back(rows_S, positions_S) | columns.adjusts_R[rows_S])

    def adjust(
        self,
        logits_SV: torch.Tensor,
        rows_S: NDArray[np.intp],
        positions_S: NDArray[np.int64],
        which: NDArray[np.intp],
    ) -> None:
        """Adjust in place the logits of those draws that `which` numbers."""
        held_back_S = self._input_batch.columns.held_back(rows_S, positions_S)
        adjustments = [
            self._adjustment(s, int(rows_S[s]), int(positions_S[s]), bool(held_back_S[s]))
            for s in which.tolist()
        ]
        self._backend.adjust_logits(logits_SV, adjustments)

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
        )

    def forced(
        self, result: StepResult, positions: Mapping[int, int]
    ) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """What grammars let follow these tokens. positions: of each request's first one."""
        further, found = dict(result.further), []
        for request_id, _ in result.tokens:
            row = self._input_batch.row(request_id)
            grammar = self._input_batch.info(row).sampling.grammar
            if grammar is None:
                continue
            start = int(self._input_batch.columns.num_prompt_R[row])
            end = positions[request_id] + 1 + len(further.get(request_id, ()))
            output = self._input_batch.tokens_RP[row, start:end]
            if tokens := self.grammars.forced(request_id, grammar, output):
                found.append((request_id, tokens))
        return tuple(found)

    def logprobs(
        self, logits_RV: torch.Tensor, tokens_R: NDArray[np.int64], counts: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Log-probabilities of one token per row of unadjusted logits, with counts[row]
        alternatives each."""
        tokens = torch.from_numpy(np.ascontiguousarray(tokens_R)).to(logits_RV.device)
        judged = self._backend.chosen_logprobs(logits_RV, tokens, max(counts))
        return token_logprobs(tokens_R, judged, counts)


def token_logprobs(
    tokens_R: NDArray[np.int64], judged: Judged, counts: Sequence[int]
) -> list[TokenLogprobs]:
    """What was judged, per token, with counts[row] alternatives."""
    chosen_R, rank_R, top_RK, ids_RK = judged
    return [
        TokenLogprobs(
            token=int(tokens_R[r]),
            logprob=float(chosen_R[r]),
            rank=int(rank_R[r]),
            top=tuple(zip(ids_RK[r, :count].tolist(), top_RK[r, :count].tolist(), strict=True)),
        )
        for r, count in enumerate(counts)
    ]
