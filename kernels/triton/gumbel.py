"""Gumbel-max sampling on the GPU, bit for bit as `kernels.torch.sampling` defines it.

Scores are float64, of some hundred operations each: only tokens whose score in float32 comes
within a tolerance of the best are scored, which is mostly one of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hash_of(token: tl.tensor, key: tl.tensor) -> tl.tensor:
    """uint32 for each token of a row; see `kernels.random_stream`."""
    x = token.to(tl.uint32) + key.to(tl.uint32)
    x = ((x ^ (x >> 17)) * tl.full((), 0xED5AD4BB, tl.uint32)) ^ (key >> 32).to(tl.uint32)
    x = (x ^ (x >> 11)) * tl.full((), 0xAC4C1B51, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), 0x31848BAB, tl.uint32)
    return x ^ (x >> 14)


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
    above = (2 * hash_V.to(tl.int64) + 1).to(tl.float64) * tl.full((), 2.0**-33, tl.float64)
    noise = -natural_log(-natural_log(one - above))
    return logit.to(tl.float64) * inverse.to(tl.float64) + noise


@triton.jit
def near_noise(hash_V: tl.tensor) -> tl.tensor:
    """The noise in float32, to an absolute error of about 1e-5."""
    # Of a small v, 1 - v would keep too few bits; the series drops v**4 / 5.
    is_small_V = hash_V < tl.full((), 0x0CCCCCCC, tl.uint32)
    part_V = tl.where(is_small_V, hash_V, hash_V ^ tl.full((), 0xFFFFFFFF, tl.uint32))
    v = (part_V.to(tl.float32) + 0.5) * (2.0**-32)  # or 1 - v
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3.0 + v * 0.25)))
    wait = tl.where(is_small_V, series, -tl.log(v))
    return -tl.log(wait)


@triton.jit
def fold_block(
    raw_V: tl.tensor,
    id_V: tl.tensor,
    kept_V: tl.tensor,
    inverse: tl.tensor,
    key: tl.tensor,
    score: tl.tensor,
    token: tl.tensor,
    tolerance: tl.tensor,
    first_id: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Fold the kept tokens of a block into the running argmax (score, token); the lowest id among
    equals. Ids are relative to the row, whose first token has id first_id.

    tolerance: at least twice what float32 may miss a score by.
    """
    near_V = raw_V * inverse + near_noise(hash_of(first_id + id_V, key))
    near_V = tl.where(kept_V, near_V, -float("inf"))
    least = tl.maximum(tl.max(near_V, 0), score.to(tl.float32)) - tolerance
    may_win_V = kept_V & (near_V >= least)
    after_all = 0x7FFFFFFF
    next_id = tl.min(tl.where(may_win_V, id_V, after_all), 0)
    while next_id < after_all:
        is_next_V = id_V == next_id
        raw = tl.max(tl.where(is_next_V, raw_V, -float("inf")), 0)
        found = gumbel_scores(raw, inverse, hash_of(first_id + next_id, key))
        better = (found > score) | ((found == score) & (next_id < token))
        score = tl.where(better, found, score)
        token = tl.where(better, next_id, token)
        next_id = tl.min(tl.where(may_win_V & (id_V > next_id), id_V, after_all), 0)
    return score, token
