"""The last stage's end of a step: logits in, StepResult out.

Runs on rank 0 only. Everything it needs beyond the logits is the mirrored request state.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from actors.scheduling.plan import Slice, TokenLogprobs
from actors.stage.grammar import GrammarMasks
from actors.stage.state import RequestState, RowInfo
from kernels.sampling import Adjustment, SamplingRows, adjust, chosen_logprobs, sample


class Sampler:
    """Draws tokens and gathers log-probabilities for the slices of one step."""

    def __init__(
        self, state: RequestState, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._state = state
        self._vocab_size = vocab_size
        self.grammars = GrammarMasks(folder, vocab_size, eos_token_ids)

    def tokens(self, slices: Sequence[Slice], logits_SV: torch.Tensor) -> NDArray[np.int64]:
        """One token per slice from its row of float32 logits, which are adjusted in place."""
        infos = [self._state.info(s.request_id) for s in slices]
        positions = [s.start + s.num_tokens for s in slices]
        adjustments = [
            a
            for row, (info, position) in enumerate(zip(infos, positions, strict=True))
            if (a := self._adjustment(row, info, position)) is not None
        ]
        adjust(logits_SV, adjustments)
        params = [info.sampling for info in infos]
        rows = SamplingRows(
            temperature_S=np.array([p.temperature for p in params], dtype=np.float32),
            top_k_S=np.array([p.top_k for p in params], dtype=np.int32),
            top_p_S=np.array([p.top_p for p in params], dtype=np.float32),
            min_p_S=np.array([p.min_p for p in params], dtype=np.float32),
            seed_S=np.array([p.seed for p in params], dtype=np.int64),
            position_S=np.array(positions, dtype=np.int64),
        )
        return sample(logits_SV, rows)

    def logprobs(
        self, slices: Sequence[Slice], raw_SV: torch.Tensor, tokens_S: NDArray[np.int64]
    ) -> tuple[tuple[int, TokenLogprobs], ...]:
        """For the slices whose request asks; raw_SV are the logits before adjustment."""
        wanted: list[int] = []
        counts: list[int] = []
        for row, piece in enumerate(slices):
            count = self._state.info(piece.request_id).sampling.logprobs
            if count is not None:
                wanted.append(row)
                counts.append(count)
        if not wanted:
            return ()
        entries = token_logprobs(raw_SV[wanted], tokens_S[wanted], counts)
        ids = (slices[row].request_id for row in wanted)
        return tuple(zip(ids, entries, strict=True))

    def _adjustment(self, row: int, info: RowInfo, position: int) -> Adjustment | None:
        p = info.sampling
        num_output = position - info.num_prompt_tokens
        held_back = num_output < p.min_tokens and bool(p.stop_token_ids)
        penalised = (
            p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
        )
        if not (p.logit_bias or penalised or held_back or p.grammar is not None):
            return None
        tokens = self._state.tokens_RP[self._state.row(info.request_id), :position]
        output = tokens[info.num_prompt_tokens :]
        in_vocabulary = self._vocab_size
        return Adjustment(
            row=row,
            prompt=tokens[: info.num_prompt_tokens],
            output=output,
            bias=tuple((t, b) for t, b in p.logit_bias if 0 <= t < in_vocabulary),
            repetition_penalty=p.repetition_penalty,
            presence_penalty=p.presence_penalty,
            frequency_penalty=p.frequency_penalty,
            forbidden=tuple(t for t in p.stop_token_ids if 0 <= t < in_vocabulary)
            if held_back
            else (),
            allowed_W=self.grammars.mask(info.request_id, p.grammar, output)
            if p.grammar is not None
            else None,
        )


def token_logprobs(
    logits_RV: torch.Tensor, tokens_R: NDArray[np.int64], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """One entry per row, with counts[row] alternatives."""
    tokens = torch.from_numpy(np.ascontiguousarray(tokens_R)).to(logits_RV.device)
    chosen_R, rank_R, top_RK, ids_RK = chosen_logprobs(logits_RV, tokens, max(counts))
    return [
        TokenLogprobs(
            token=int(tokens_R[r]),
            logprob=float(chosen_R[r]),
            rank=int(rank_R[r]),
            top=tuple(zip(ids_RK[r, :count].tolist(), top_RK[r, :count].tolist(), strict=True)),
        )
        for r, count in enumerate(counts)
    ]
