"""Sampling in torch: the definition of its semantics, and the reference of the fast samplers.

Semantics, the same everywhere, in this order:
 1. logits are adjusted: logit_bias added; repetition penalty (divide positive, multiply negative)
    on tokens of prompt and output; frequency (per occurrence) and presence (once) penalties on
    tokens of the output; tokens outside the grammar's mask and stop tokens before min_tokens
    become -inf;
 2. temperature 0 takes the highest logit, the lowest id among equals;
 3. otherwise logits / temperature; top_k keeps the k highest (lower id first among equals);
    top_p keeps the fewest highest whose probability, among those kept so far, reaches p;
    min_p keeps tokens of at least min_p times the highest probability;
 4. the Gumbel-max trick (Maddison et al., "A* Sampling", NeurIPS 2014) draws among the kept tokens:
    the argmax of logit / temperature + noise(seed, position, id), the lowest id among equals. The
    noise is Gumbel-distributed, so each token is drawn with its probability.

The score is defined bit for bit, in float64, each operation rounded by itself: it is logit
(float32) times the float32 reciprocal of the temperature, which is exact, plus -log(-log(u)) with u
= 1 - (2 h + 1) / 2**33 and h the token's hash (`kernels.random_stream`); `natural_log` defines the
logarithm. So all samplers draw the same tokens, the argmax can be taken per vocabulary shard and
then over shards (`gumbel_argmax`), and two distributions that are close mostly draw the same token.

Shape suffixes: S rows that sample, V vocabulary, W = ceil(V / 32) words of a bit mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.random_stream import HASH_FACTORS, row_keys
from kernels.sampling import Adjustment, ChosenLogprobs, SamplingRows, or_minus_one

_32_BITS = 0xFFFFFFFF
_MAX_NOISE_ELEMENTS = 1 << 18  # per chunk of rows


def adjust(logits_SV: torch.Tensor, adjustments: Sequence[Adjustment]) -> None:
    """Apply penalties, biases and masks in place to float32 logits."""
    for a in adjustments:
        logits_V = logits_SV[a.row]
        if a.bias:
            ids, values = zip(*a.bias, strict=True)
            at = torch.tensor(ids, device=logits_V.device)
            logits_V.index_add_(0, at, torch.tensor(values, device=logits_V.device))
        _penalize(logits_V, a)
        if a.allowed_W is not None:
            allowed_W = a.allowed_W.to(logits_V.device)  # grammars fill masks on the host
            logits_V.masked_fill_(~unpack_mask(allowed_W, len(logits_V)), float("-inf"))
        if a.forbidden:
            before = logits_V[list(a.forbidden)]
            logits_V[list(a.forbidden)] = float("-inf")
            # A grammar that allows nothing but a stop token outranks min_tokens.
            if a.allowed_W is not None and not torch.isfinite(logits_V.max()):
                logits_V[list(a.forbidden)] = before


def _penalize(logits_V: torch.Tensor, a: Adjustment) -> None:
    counts, device = a.counted(), logits_V.device
    if counts is None:
        return
    if a.repetition_penalty != 1.0:
        seen = torch.from_numpy(counts.ids[counts.totals > 0].astype(np.int64)).to(device)
        old = logits_V[seen]
        factor = a.repetition_penalty
        logits_V[seen] = torch.where(old > 0, old / factor, old * factor)
    if a.counts_output:
        is_out = counts.in_output > 0
        penalty = a.frequency_penalty * counts.in_output[is_out] + a.presence_penalty
        at = torch.from_numpy(counts.ids[is_out].astype(np.int64)).to(device)
        logits_V[at] -= torch.from_numpy(penalty.astype(np.float32)).to(device)


def unpack_mask(mask_W: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """int32 words -> bool per token."""
    bits = torch.arange(32, dtype=torch.int32, device=mask_W.device)
    return ((mask_W[:, None] >> bits) & 1).bool().flatten()[:vocab_size]


def sample(logits_SV: torch.Tensor, rows: SamplingRows) -> NDArray[np.int64]:
    """One token id per row of adjusted float32 logits, which are left as they are; -1 where one is
    NaN or the highest is not finite."""
    highest_S = logits_SV.argmax(dim=-1)  # NaN counts as the highest
    tokens_S = highest_S.clone()
    warm = np.flatnonzero(rows.temperature_S > 0)
    if warm.size:
        at = torch.from_numpy(warm).to(logits_SV.device)
        tokens_S[at] = _draw(logits_SV[at], rows, warm)
    tokens_S.masked_fill_(or_minus_one(highest_S, logits_SV) < 0, -1)
    drawn_S: NDArray[np.int64] = tokens_S.cpu().numpy()
    return drawn_S


def _draw(logits_SV: torch.Tensor, rows: SamplingRows, warm: NDArray[np.intp]) -> torch.Tensor:
    device = logits_SV.device

    def column(values: NDArray[np.float32] | NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(values[warm]).to(device)[:, None]

    scores_SV = _scores(logits_SV, rows, warm, 0)
    top_k_S1, top_p_S1, min_p_S1 = column(rows.top_k_S), column(rows.top_p_S), column(rows.min_p_S)
    if bool(((top_k_S1 > 0) | (top_p_S1 < 1) | (min_p_S1 > 0)).any()):
        # From the highest down: nothing overflows, however low the temperature.
        scaled_SV = logits_SV - logits_SV.amax(dim=-1, keepdim=True)
        scaled_SV /= column(rows.temperature_S)
        kept_SV = kept_probabilities(scaled_SV, top_k_S1, top_p_S1, min_p_S1)
        scores_SV.masked_fill_(kept_SV == 0, float("-inf"))
    return scores_SV.argmax(dim=-1)


def gumbel_argmax(
    logits_SV: torch.Tensor, rows: SamplingRows, first_id: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Gumbel-max over a vocabulary shard that begins at first_id: (scores_S, tokens_S).

    The token of the highest score over all shards, the lowest id among equals, is the one that
    `sample` draws. For rows without top_k, top_p and min_p. At temperature 0 the score is the
    logit.
    """
    scores_SV = logits_SV.double()
    warm = np.flatnonzero(rows.temperature_S > 0)
    if warm.size:
        at = torch.from_numpy(warm).to(logits_SV.device)
        scores_SV[at] = _scores(logits_SV[at], rows, warm, first_id)
    best_S, token_S = scores_SV.max(dim=-1)
    return best_S.cpu().numpy(), token_S.cpu().numpy() + first_id


def inverse_temperatures(temperature_S: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32 reciprocals; 0 where the temperature is 0."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse_S = np.minimum(np.float32(1) / temperature_S, np.float32(3e38))
    return np.where(temperature_S > 0, inverse_S, np.float32(0))


def _scores(
    logits_SV: torch.Tensor, rows: SamplingRows, which: NDArray[np.intp], first_id: int
) -> torch.Tensor:
    """Perturbed logits in float64, for the rows `which` of `rows`, which `logits_SV` holds."""
    keys_S = row_keys(rows.seed_S[which], rows.position_S[which])
    inverse_S = torch.from_numpy(inverse_temperatures(rows.temperature_S[which])).double()
    scores_SV = logits_SV.double()
    scores_SV *= inverse_S.to(logits_SV.device)[:, None]
    low_S, high_S = (keys_S & np.uint64(_32_BITS)), (keys_S >> np.uint64(32))
    keys_S2 = torch.from_numpy(np.stack((low_S, high_S), 1).astype(np.int64)).to(logits_SV.device)
    num_tokens = logits_SV.shape[1]
    few = max(
        1, _MAX_NOISE_ELEMENTS // num_tokens
    )  # rows at a time: bounds the intermediate tensors
    for s in range(0, len(keys_S), few):
        scores_SV[s : s + few] += gumbel_noise(keys_S2[s : s + few], first_id, num_tokens)
    return scores_SV


def gumbel_noise(keys_S2: torch.Tensor, first_id: int, num_tokens: int) -> torch.Tensor:
    """(S, num_tokens) float64 Gumbel noise of the tokens from first_id on. keys_S2: lower and upper
    32 bits of each row's key."""
    low_S1, high_S1 = keys_S2[:, :1], keys_S2[:, 1:]
    a, b, c = HASH_FACTORS
    x = torch.arange(first_id, first_id + num_tokens, device=keys_S2.device)
    x = (x + low_S1) & _32_BITS  # of 64: products wrap and keep these
    x = (((x ^ (x >> 17)) * a) & _32_BITS) ^ high_S1
    x = ((x ^ (x >> 11)) * b) & _32_BITS
    x = ((x ^ (x >> 15)) * c) & _32_BITS
    hash_SV = x ^ (x >> 14)
    wait_SV = -natural_log(1.0 - (2 * hash_SV + 1).double() * 2.0**-33)
    return -natural_log(wait_SV)


def natural_log(x: torch.Tensor) -> torch.Tensor:
    """Logarithm of positive float64 numbers, to a relative error of about 1e-13: the same bits
    wherever each of these operations is rounded by itself."""
    mantissa, exponent = torch.frexp(x)
    is_low = mantissa < 0.7071067811865476
    mantissa = torch.where(is_low, mantissa + mantissa, mantissa)
    z = (mantissa - 1.0) / (mantissa + 1.0)
    w = z * z
    p = torch.full_like(w, 1.0 / 15)
    for n in (13, 11, 9, 7, 5, 3, 1):
        p = p * w + 1.0 / n
    return (exponent - is_low.int()).double() * 0.6931471805599453 + (z + z) * p


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


def gather_logprobs(
    logits_RV: torch.Tensor, tokens_R: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logprob_R, rank_R, top_RK, ids_RK) under the unadjusted distribution: log-probability and
    rank (1 is the likeliest) of each row's token, and the num_top likeliest. No synchronization."""
    logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
    chosen_R1 = logprobs_RV.gather(1, tokens_R[:, None])
    rank_R = 1 + (logprobs_RV > chosen_R1).sum(dim=-1)
    top = logprobs_RV.topk(min(num_top, logprobs_RV.shape[1]), dim=-1)
    return chosen_R1[:, 0], rank_R, top.values, top.indices


def chosen_logprobs(
    logits_RV: torch.Tensor, tokens_R: torch.Tensor, num_top: int
) -> ChosenLogprobs:
    """As `gather_logprobs`, on the host."""
    chosen_R, rank_R, top_RK, ids_RK = (
        x.cpu().numpy() for x in gather_logprobs(logits_RV, tokens_R, num_top)
    )
    return chosen_R, rank_R, top_RK, ids_RK
