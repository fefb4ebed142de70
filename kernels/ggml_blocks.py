"""The block formats of GGUF files: dequantized and, where that is exact, kept as integers.

A block holds consecutive input features of one row. Bytes of a block, from the start (little
endian; d, m: float16 scale and minimum):

| type | features | bytes | layout | means |
|---|---|---|---|---|
| Q4_0 | 32 | 18 | d, 16 nibble pairs | d (q - 8) |
| Q4_1 | 32 | 20 | d, m, 16 nibble pairs | d q + m |
| Q5_0 | 32 | 22 | d, 32 high bits, 16 nibble pairs | d (q - 16) |
| Q5_1 | 32 | 24 | d, m, 32 high bits, 16 nibble pairs | d q + m |
| Q8_0 | 32 | 34 | d, 32 int8 | d q |
| Q4_K | 256 | 144 | d, m, 8 scales s and minima t of six bits, 128 nibble pairs | d s q - m t |
| Q5_K | 256 | 176 | as Q4_K with 32 bytes of high bits before the nibbles | d s q - m t |
| Q6_K | 256 | 210 | 128 nibble pairs, 64 times 4 high bit pairs, 16 int8 s, d | d s (q - 32) |
| MXFP4 | 32 | 17 | exponent e, 16 nibble pairs: floats f of four bits (e2m1) | 2^(e - 127) f |

Only Q4_0 and Q8_0 are `QuantizedWeight`s: the scales of the others are products that float16 does
not hold exactly. Source: ggml-common.h and ggml-quants.c of ggml.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.quantized import QuantizedWeight

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BlockType:
    """features and num_bytes of one block. decode: (blocks, num_bytes) to (blocks, features)."""

    name: str
    features: int
    num_bytes: int
    decode: Callable[[Bytes], Floats]


def dequantize(raw: Bytes, kind: BlockType) -> Floats:
    """(rows, bytes of a row) as stored to (rows, features)."""
    rows = raw.shape[0]
    return kind.decode(raw.reshape(-1, kind.num_bytes)).reshape(rows, -1)


def as_quantized(raw: Bytes, kind: BlockType) -> QuantizedWeight | None:
    """The same weight as integers in groups of 32, exactly; None where its format does not allow
    it."""
    if kind.name not in PACKED:
        return None
    rows = raw.shape[0]
    blocks = raw.reshape(-1, kind.num_bytes)
    if kind.name == "Q8_0":
        values, bits = blocks[:, 2:].view(np.int8), 8
    else:
        values, bits = _nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8), 4
    scales = _half(blocks, 0)
    return QuantizedWeight(
        torch.from_numpy(values.reshape(rows, -1).copy()),
        torch.from_numpy(scales.reshape(rows, -1).copy()),
        bits,
        kind.features,
    )


def _half(blocks: Bytes, at: int) -> Floats:
    """(blocks, 1) float32: the float16 at byte `at` of each block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(pairs: Bytes, run: int = 16) -> Bytes:
    """The halves of each run of bytes: first all low ones, then all high ones."""
    runs = pairs.reshape(len(pairs), -1, 1, run)
    shifts = np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
    return ((runs >> shifts) & np.uint8(15)).reshape(len(pairs), -1)


def _high_bits(packed: Bytes) -> Bytes:
    """32 bits, lowest first, as the fifth bit of 32 numbers."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _floats(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view(np.float32).copy()  # not a view of the file


def _halves(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view(np.float16).astype(np.float32)


def _bfloats(blocks: Bytes) -> Floats:
    words = np.ascontiguousarray(blocks).view(np.uint16).astype(np.uint32)
    return (words << np.uint32(16)).view(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    values = _nibbles(blocks[:, 6:]) | _high_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (values.astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Floats:
    values = _nibbles(blocks[:, 8:]) | _high_bits(blocks[:, 4:8])
    return _half(blocks, 0) * values.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_k(blocks: Bytes) -> Floats:
    return _scaled_with_minima(blocks, _nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: Bytes) -> Floats:
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    high = (blocks[:, None, 16:48] >> shifts) & np.uint8(1)
    values = _nibbles(blocks[:, 48:], 32) | (high << np.uint8(4)).reshape(len(blocks), -1)
    return _scaled_with_minima(blocks, values)


def _scaled_with_minima(blocks: Bytes, values: Bytes) -> Floats:
    """Dequantize eight sub-blocks of 32. Of the six-bit scales and minima, the first four of each
    are the low six bits of a byte, whose upper two bits belong to the other four; their lower four
    bits are in the last four bytes, scale in the low nibble."""
    packed = blocks[:, 4:16].reshape(-1, 3, 4)
    scales, minima, rest = packed[:, 0], packed[:, 1], packed[:, 2]
    scale = np.concatenate([scales & 63, (rest & 15) | ((scales >> 2) & 48)], axis=1)
    minimum = np.concatenate([minima & 63, (rest >> 4) | ((minima >> 2) & 48)], axis=1)
    step = (_half(blocks, 0) * scale.astype(np.float32))[:, :, None]
    offset = (_half(blocks, 2) * minimum.astype(np.float32))[:, :, None]
    runs = values.reshape(len(blocks), 8, 32).astype(np.float32)
    return (step * runs - offset).reshape(len(blocks), -1)


def _q6_k(blocks: Bytes) -> Floats:
    num = len(blocks)
    low = _nibbles(blocks[:, :128], 64)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    high = (blocks[:, 128:192].reshape(num, 2, 1, 32) >> shifts) & np.uint8(3)
    values = (low | (high.reshape(num, -1) << np.uint8(4))).astype(np.float32) - 32
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    steps = (_half(blocks, 208) * scales)[:, :, None]
    return (steps * values.reshape(num, 16, 16)).reshape(num, -1)


def _mxfp4(blocks: Bytes) -> Floats:
    exponents = blocks[:, :1].astype(np.int32) - 127
    return np.ldexp(_FLOATS_OF_FOUR_BITS[_nibbles(blocks[:, 1:])], exponents)


_FLOATS_OF_FOUR_BITS = np.array(
    [sign * size for sign in (1, -1) for size in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], np.float32
)

# By type id in a file.
BLOCK_TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4, _floats),
    1: BlockType("F16", 1, 2, _halves),
    2: BlockType("Q4_0", 32, 18, _q4_0),
    3: BlockType("Q4_1", 32, 20, _q4_1),
    6: BlockType("Q5_0", 32, 22, _q5_0),
    7: BlockType("Q5_1", 32, 24, _q5_1),
    8: BlockType("Q8_0", 32, 34, _q8_0),
    12: BlockType("Q4_K", 256, 144, _q4_k),
    13: BlockType("Q5_K", 256, 176, _q5_k),
    14: BlockType("Q6_K", 256, 210, _q6_k),
    30: BlockType("BF16", 1, 2, _bfloats),
    39: BlockType("MXFP4", 32, 17, _mxfp4),
}
PACKED = ("Q4_0", "Q8_0")
# Names of unsupported type ids, for error messages.
OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16",
    26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
}  # fmt: skip
