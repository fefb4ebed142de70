"""MXFP4 weights, as gpt-oss stores them: 32 values share a power-of-two scale.

A value is e2m1: a sign, then 0, 0.5, 1, 1.5, 2, 3, 4 or 6. A byte packs two, the first in its low
nibble; a scale is a byte b for 2^(b - 127) (e8m0). Source: the OCP Microscaling Formats
specification."""

from __future__ import annotations

import torch

GROUP = 32
_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NOT_A_NUMBER = 255  # as a scale


def unpack_mxfp4(blocks_OGB: torch.Tensor, scales_OG: torch.Tensor) -> torch.Tensor:
    """(O, G * 32) float32 from uint8 blocks (O, G, 16) and scales (O, G). Raises ValueError for
    other dtypes or shapes, or a NaN scale."""
    shape = tuple(scales_OG.shape)
    if tuple(blocks_OGB.shape) != (*shape, GROUP // 2):
        raise ValueError(f"blocks {tuple(blocks_OGB.shape)} do not fit scales {shape}")
    if blocks_OGB.dtype != torch.uint8 or scales_OG.dtype != torch.uint8:
        raise ValueError(f"{blocks_OGB.dtype} and {scales_OG.dtype} are not bytes")
    if bool((scales_OG == _NOT_A_NUMBER).any()):
        raise ValueError("a scale is not a number")
    # Lookup table: both values of each byte.
    values_F = torch.tensor([sign * size for sign in (1.0, -1.0) for size in _SIZES])
    byte_X = torch.arange(256)
    pairs_X2 = torch.stack((values_F[byte_X & 15], values_F[byte_X >> 4]), dim=1)
    numbers_OGB2 = pairs_X2[blocks_OGB.int()]
    exponents_OG = scales_OG.int() - 127
    return torch.ldexp(numbers_OGB2.flatten(2), exponents_OG[:, :, None]).flatten(1)
