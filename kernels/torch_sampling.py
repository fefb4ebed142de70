"""Drawing the next token of every sampling row in torch: the reference of the fast samplers.

Semantics, the same everywhere, in this order:
 1. logits are adjusted: logit_bias added; repetition penalty (divide positive, multiply negative)
    on tokens of prompt and output; frequency (per occurrence) and presence (once) penalties on
    tokens of the output; tokens outside the grammar's mask and stop tokens before min_tokens
    become -inf;
 2. temperature 0 takes the highest logit, the lowest id among equals;
 3. otherwise logits / temperature; top_k keeps the k highest (lower id first among equals);
    top_p keeps the fewest highest whose probability, among those kept so far, reaches p;
    min_p keeps tokens of at least min_p times the highest probability;
 4. u = uniform(seed, position) picks the first token, in id order, whose cumulative kept
    probability exceeds u times their total.

Shape suffixes: S rows that sample, V vocabulary, W = ceil(V / 32) words of a bit mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.random_stream import uniform

# Log-probability and rank of each row's token; log-probabilities and ids of the likeliest.
Judged = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]


@dataclass(slots=True)
class SamplingRows:
    """How each row draws. position: where in the sequence the drawn token will stand."""

    temperature_S: NDArray[np.float32]
    top_k_S: NDArray[np.int32]  # 0: off
    top_p_S: NDArray[np.float32]
    min_p_S: NDArray[np.float32]
    seed_S: NDArray[np.int64]
    position_S: NDArray[np.int64]


@dataclass(slots=True)
class Adjustment:
    """What changes one row's logits before the draw. Ids are within the vocabulary.

    allowed_W: int32 bit mask of the grammar, lowest bit the lowest id; None allows everything.
    forbidden: ids that may not be drawn (stop tokens before min_tokens).
    """

    row: int
    prompt: NDArray[np.int32]
    output: NDArray[np.int32]
    bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    forbidden: tuple[int, ...] = ()
    allowed_W: torch.Tensor | None = None


def adjust(logits_SV: torch.Tensor, adjustments: Sequence[Adjustment]) -> None:
    """Apply penalties, biases and masks in place to float32 logits."""
    for a in adjustments:
        logits_V = logits_SV[a.row]
        if a.bias:
            ids, values = zip(*a.bias, strict=True)
            at = torch.tensor(ids, device=logits_V.device)
            logits_V.index_add_(0, at, torch.tensor(values, device=logits_V.device))
        _penalise(logits_V, a)
        if a.allowed_W is not None:
            logits_V.masked_fill_(~unpack_mask(a.allowed_W, len(logits_V)), float("-inf"))
        if a.forbidden:
            before = logits_V[list(a.forbidden)]
            logits_V[list(a.forbidden)] = float("-inf")
            # A grammar that has nothing left but the end outranks min_tokens.
            if a.allowed_W is not None and not torch.isfinite(logits_V.max()):
                logits_V[list(a.forbidden)] = before


def _penalise(logits_V: torch.Tensor, a: Adjustment) -> None:
    device = logits_V.device
    if a.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.union1d(a.prompt, a.output).astype(np.int64)).to(device)
        old = logits_V[seen]
        factor = a.repetition_penalty
        logits_V[seen] = torch.where(old > 0, old / factor, old * factor)
    if (a.presence_penalty or a.frequency_penalty) and len(a.output):
        ids, counts = np.unique(a.output, return_counts=True)
        penalty = a.frequency_penalty * counts + a.presence_penalty
        at = torch.from_numpy(ids.astype(np.int64)).to(device)
        logits_V[at] -= torch.from_numpy(penalty.astype(np.float32)).to(device)


def unpack_mask(mask_W: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """int32 words -> bool per token."""
    bits = torch.arange(32, dtype=torch.int32, device=mask_W.device)
    return ((mask_W[:, None] >> bits) & 1).bool().flatten()[:vocab_size]


def sample(logits_SV: torch.Tensor, rows: SamplingRows) -> NDArray[np.int64]:
    """One token id per row of adjusted float32 logits, which are left as they are."""
    tokens_S = logits_SV.argmax(dim=-1).cpu().numpy()
    warm = np.flatnonzero(rows.temperature_S > 0)
    if warm.size:
        tokens_S = tokens_S.copy()
        tokens_S[warm] = _draw(logits_SV[torch.from_numpy(warm)], rows, warm)
    return tokens_S


def _draw(logits_SV: torch.Tensor, rows: SamplingRows, warm: NDArray[np.intp]) -> NDArray[np.int64]:
    device = logits_SV.device

    def column(values: NDArray[np.float32] | NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(values[warm]).to(device)[:, None]

    scaled_SV = logits_SV / column(rows.temperature_S)
    kept_SV = kept_probabilities(
        scaled_SV, column(rows.top_k_S), column(rows.top_p_S), column(rows.min_p_S)
    )
    cumulative_SV = kept_SV.double().cumsum(dim=-1)
    draws = [uniform(int(rows.seed_S[s]), int(rows.position_S[s])) for s in warm]
    u_S1 = torch.tensor(draws, dtype=torch.float64, device=device)[:, None]
    picked_S = torch.searchsorted(cumulative_SV, u_S1 * cumulative_SV[:, -1:], right=True)[:, 0]
    # u * total may round up to the total itself: the last kept token is then the one.
    last_S = kept_SV.shape[1] - 1 - (kept_SV > 0).flip(-1).int().argmax(dim=-1)
    picked: NDArray[np.int64] = torch.minimum(picked_S, last_S).cpu().numpy()
    return picked


def kept_probabilities(
    scaled_SV: torch.Tensor, top_k_S1: torch.Tensor, top_p_S1: torch.Tensor, min_p_S1: torch.Tensor
) -> torch.Tensor:
    """Softmax probabilities with the tokens that top_k, top_p and min_p drop set to zero."""
    probability_SV = torch.softmax(scaled_SV, dim=-1)
    if bool((top_k_S1 > 0).any()) or bool((top_p_S1 < 1).any()):
        # Stable: among equal probabilities the lower id ranks higher.
        sorted_SV, order_SV = probability_SV.sort(dim=-1, descending=True, stable=True)
        rank_V = torch.arange(sorted_SV.shape[1], device=sorted_SV.device)
        sorted_SV = sorted_SV.masked_fill((top_k_S1 > 0) & (rank_V >= top_k_S1), 0.0)
        wide_SV = sorted_SV.double()
        before_SV = wide_SV.cumsum(dim=-1) - wide_SV
        nucleus_S1 = top_p_S1.double() * wide_SV.sum(dim=-1, keepdim=True)
        outside_SV = (top_p_S1 < 1) & (before_SV >= nucleus_S1) & (rank_V > 0)
        sorted_SV = sorted_SV.masked_fill(outside_SV, 0.0)
        probability_SV = torch.zeros_like(probability_SV).scatter_(1, order_SV, sorted_SV)
    highest_S1 = probability_SV.amax(dim=-1, keepdim=True)
    return probability_SV.masked_fill(probability_SV < min_p_S1 * highest_S1, 0.0)


def judge(
    logits_RV: torch.Tensor, tokens_R: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the model's own distribution (before any adjustment), per row: the token's
    log-probability and rank (1 is the likeliest), and the num_top likeliest with their ids. Waits
    for nothing."""
    logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
    chosen_R1 = logprobs_RV.gather(1, tokens_R[:, None])
    rank_R = 1 + (logprobs_RV > chosen_R1).sum(dim=-1)
    top = logprobs_RV.topk(min(num_top, logprobs_RV.shape[1]), dim=-1)
    return chosen_R1[:, 0], rank_R, top.values, top.indices


def chosen_logprobs(logits_RV: torch.Tensor, tokens_R: torch.Tensor, num_top: int) -> Judged:
    """The same on the host."""
    chosen_R, rank_R, top_RK, ids_RK = (
        x.cpu().numpy() for x in judge(logits_RV, tokens_R, num_top)
    )
    return chosen_R, rank_R, top_RK, ids_RK
