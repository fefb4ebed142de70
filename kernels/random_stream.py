"""The counter-based random number generator of sampling: a number per (seed, position, token id).

A draw depends on these alone, never on the batch, the policy or earlier draws, so a replayed
request repeats its tokens. Seed and position are mixed by SplitMix64's finalizer (Steele,
Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014) into the key of a
row, and the key is mixed with the token's id by a 32-bit hash of three multiplications (C. Wellons'
triple32, with the key's other half between them). A row's numbers are all distinct.

`kernels.torch.sampling`, `kernels/cpu/src/sampling.cpp` and `kernels.triton.sampling` compute the
same bits. A change of any bit of a draw increments DRAW_VERSION: engines of different versions do
not continue each other's streams."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DRAW_VERSION = 2  # 1: inverse-CDF sampling in token id order

HASH_FACTORS = (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB)
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def row_keys(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The key of each (seed, position), both taken modulo 2**64.

    >>> keys = row_keys(np.array([3, -1, 3]), np.array([5, 0, 5]))
    >>> bool(keys[0] == keys[2]), bool(keys[0] == keys[1])
    (True, False)
    """
    gamma, one = np.uint64(_GOLDEN_GAMMA), np.uint64(1)
    with np.errstate(over="ignore"):
        state = _mix64(seeds.astype(np.uint64) + gamma)
        return _mix64(state + (positions.astype(np.uint64) + one) * gamma)


def _mix64(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
