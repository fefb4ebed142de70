"""The counter-based random stream that sampling draws from.

A draw depends on (seed, position) alone, never on the batch, the policy or what was drawn
before, so a replayed request repeats its tokens. The finaliser is SplitMix64's (Steele, Lea and
Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014), applied once to the seed
and once to the position added to it; `kernels/cpu/src/sampling.cpp` computes the same bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def _mix64(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int) -> float:
    """The draw in [0, 1), of 53 bits, that belongs to `position` of the stream `seed`.

    Both are taken modulo 2**64.

    >>> uniform(0, 0) == uniform(0, 0) and uniform(0, 0) != uniform(0, 1)
    True
    """
    state = _mix64((seed + _GOLDEN_GAMMA) & _MASK)
    return (_mix64((state + (position + 1) * _GOLDEN_GAMMA) & _MASK) >> 11) * 2.0**-53


def uniforms(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """The draw of each (seed, position), as `uniform` makes it.

    >>> uniforms(np.array([3, -1]), np.array([5, 0])).tolist() == [uniform(3, 5), uniform(-1, 0)]
    True
    """
    gamma, one = np.uint64(_GOLDEN_GAMMA), np.uint64(1)
    with np.errstate(over="ignore"):  # both are taken modulo 2**64
        state = _mix64_all(seeds.astype(np.uint64) + gamma)
        mixed = _mix64_all(state + (positions.astype(np.uint64) + one) * gamma)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix64_all(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
