"""Gumbel-max sampling on the GPU, bit for bit as `kernels.torch.sampling` defines it.

Scores are float64, in which most GPUs are slow: a block of tokens is scored only where a float32
upper bound shows that one of them may exceed the best score, which few do.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hash_of(token: tl.tensor, key: tl.tensor) -> tl.tensor:
    """32 bits for each token of a row, in int64; see `kernels.random_stream`."""
    x = token.to(tl.uint32) + key.to(tl.uint32)
    x = ((x ^ (x >> 17)) * tl.full((), 0xED5AD4BB, tl.uint32)) ^ (key >> 32).to(tl.uint32)
    x = (x ^ (x >> 11)) * tl.full((), 0xAC4C1B51, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), 0x31848BAB, tl.uint32)
    return (x ^ (x >> 14)).to(tl.int64)


@triton.jit
def natural_log(x: tl.tensor) -> tl.tensor:
    """Of positive normal float64 numbers, as `kernels.torch.sampling.natural_log`."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1022
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | (1022 << 52)).to(tl.float64, bitcast=True)
    is_low = mantissa < tl.full((), 0.7071067811865476, tl.float64)
    mantissa = tl.where(is_low, mantissa + mantissa, mantissa)
    exponent = tl.where(is_low, exponent - 1, exponent).to(tl.float64)
    one = tl.full((), 1.0, tl.float64)
    z = (mantissa - one) / (mantissa + one)
    w = z * z
    p = one / 15.0
    p = p * w + one / 13.0
    p = p * w + one / 11.0
    p = p * w + one / 9.0
    p = p * w + one / 7.0
    p = p * w + one / 5.0
    p = p * w + one / 3.0
    p = p * w + one
    return exponent * tl.full((), 0.6931471805599453, tl.float64) + (z + z) * p


@triton.jit
def gumbel_scores(logit: tl.tensor, inverse: tl.tensor, hash_V: tl.tensor) -> tl.tensor:
    """Perturbed logits in float64, each operation rounded by itself, as in
    `kernels.torch.sampling`."""
    one = tl.full((), 1.0, tl.float64)
    above = (2 * hash_V + 1).to(tl.float64) * tl.full((), 2.0**-33, tl.float64)
    noise = -natural_log(-natural_log(one - above))
    return logit.to(tl.float64) * inverse.to(tl.float64) + noise


@triton.jit
def block_argmax(
    raw: tl.tensor,
    id_V: tl.tensor,
    kept: tl.tensor,
    inverse: tl.tensor,
    key: tl.tensor,
    score: tl.tensor,
    token: tl.tensor,
    tolerance: tl.tensor,
    first_id: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Fold the kept tokens of a block into the running argmax (score, token); the lowest id among
    equals. Ids are relative to the row, whose first token has id first_id."""
    hash_V = hash_of(first_id + id_V, key)
    # With v = (2 h + 1) / 2^33, the noise -log(-log(1 - v)) is at most -log(v).
    above = (hash_V.to(tl.float32) + 0.5) * (2.0**-32)
    most = raw * inverse - tl.log(above)
    may_win = kept & (most >= score.to(tl.float32) - tolerance)
    if tl.max(may_win.to(tl.int32), 0) > 0:
        found = tl.where(kept, gumbel_scores(raw, inverse, hash_V), -float("inf"))
        best = tl.max(found, 0)
        first = tl.min(tl.where(found == best, id_V, 0x7FFFFFFF), 0)
        better = (best > score) | ((best == score) & (first < token))
        score = tl.where(better, best, score)
        token = tl.where(better, first, token)
    return score, token
