"""ALiBi: scores that fall with the distance of a key, instead of positions in q and k.

Implementations differ in the slopes of head numbers that are no power of two, and in what they
round; both are followed here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch  # within functions: who only reads configs need not wait for it


@dataclass(frozen=True, slots=True)
class Alibi:
    """slopes: what a head's score loses per token of distance, of every head, exact in float32.

    rounds: slope, position and their product are rounded to bfloat16, so that the bias falls in
    steps. divisor: of the bias, after rounding.
    """

    slopes: tuple[float, ...]
    rounds: bool = False
    divisor: float = 1.0


def bloom_slopes(num_heads: int) -> tuple[float, ...]:
    """The slopes of the next lower power of two of heads, then every other one of twice as many.

    >>> bloom_slopes(6)
    (0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125)
    """
    import torch

    power = 2 ** math.floor(math.log2(num_heads))
    rest = torch.arange(1, 1 + 2 * (num_heads - power), 2, dtype=torch.int32)
    slopes = torch.pow(_base(power), torch.arange(1, 1 + power, dtype=torch.int32))
    return tuple(torch.cat((slopes, torch.pow(_base(2 * power), rest))).tolist())


def mpt_slopes(num_heads: int, largest: float) -> tuple[float, ...]:
    """Every other slope of the next higher power of two of heads, then those between.

    largest: the exponent of the last slope.

    >>> mpt_slopes(6, 8)
    (0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125)
    """
    import torch

    power = 2 ** math.ceil(math.log2(num_heads))
    exponents = torch.arange(1, power + 1).float() * (largest / power)
    slopes = 1.0 / torch.pow(2, exponents)
    if power != num_heads:
        slopes = torch.cat((slopes[1::2], slopes[::2]))[:num_heads]
    return tuple(slopes.tolist())


def alibi_table(alibi: Alibi, num_positions: int, heads: slice) -> torch.Tensor:
    """`AttentionShape.alibi_NP` of these heads: float32 of (heads, num_positions)."""
    import torch

    slopes_N = torch.tensor(alibi.slopes[heads])
    if alibi.rounds:
        slopes_N = slopes_N.bfloat16()
    return (slopes_N[:, None] * torch.arange(num_positions)).float() / alibi.divisor


def _base(num_heads: int) -> torch.Tensor:
    """The first slope of a power of two of heads, and the ratio of the others."""
    import torch

    return torch.tensor(2 ** -(2 ** -(math.log2(num_heads) - 3)))
