"""A counter-based random stream: one uniform number per (seed, position), no state anywhere.

A draw depends on nothing but its request's seed and the position of the token drawn, so a replay
after a failure, another batch or another scheduling policy draws the same numbers. The mixing
function is the SplitMix64 finaliser (Steele, Lea, Flood: "Fast splittable pseudorandom number
generators", OOPSLA 2014), applied once to the seed and once to the keyed position:

    mix(z): z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31
    uniform = (mix(mix(seed + G) + G * (position + 1)) >> 11) * 2**-53,  G = 0x9E3779B97F4A7C15

all modulo 2**64. Every sampler, in Python, C++ or on a GPU, computes exactly this.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MULTIPLY_1
    z = (z ^ (z >> np.uint64(27))) * _MULTIPLY_2
    return z ^ (z >> np.uint64(31))


def uniform(seed: ArrayLike, position: ArrayLike) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits, elementwise over seeds and positions.

    >>> float(uniform(0, 0)[()]) == float(uniform([0, 1], [0, 0])[0])
    True
    """
    seeds = np.asarray(seed, dtype=np.int64).astype(np.uint64)
    positions = np.asarray(position, dtype=np.int64).astype(np.uint64)
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is the point
        bits = _mix(_mix(seeds + _GOLDEN) + _GOLDEN * (positions + np.uint64(1)))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
