"""The block formats of GGUF files: dequantized and, where that is exact, kept as integers.

A block holds consecutive input features of one row. Bytes of a block, from the start (little
endian; d, m: float16 scale and minimum):

| type | features | bytes | layout | means |
|---|---|---|---|---|
| TQ1_0 | 256 | 54 | 48 bytes of five digits q to base 3, 4 of four, d | d (q - 1) |
| TQ2_0 | 256 | 66 | 64 times 4 bit pairs, d | d (q - 1) |
| Q2_K | 256 | 84 | 16 nibble pairs of s and t, 64 times 4 bit pairs, d, m | d s q - m t |
| Q3_K | 256 | 110 | 256 high bits, 64 times 4 bit pairs, 16 s of six bits, d | d (s - 32) (q - 4) |
| Q4_0 | 32 | 18 | d, 16 nibble pairs | d (q - 8) |
| Q4_1 | 32 | 20 | d, m, 16 nibble pairs | d q + m |
| Q5_0 | 32 | 22 | d, 32 high bits, 16 nibble pairs | d (q - 16) |
| Q5_1 | 32 | 24 | d, m, 32 high bits, 16 nibble pairs | d q + m |
| Q8_0 | 32 | 34 | d, 32 int8 | d q |
| Q4_K | 256 | 144 | d, m, 8 scales s and minima t of six bits, 128 nibble pairs | d s q - m t |
| Q5_K | 256 | 176 | as Q4_K with 32 bytes of high bits before the nibbles | d s q - m t |
| Q6_K | 256 | 210 | 128 nibble pairs, 64 times 4 high bit pairs, 16 int8 s, d | d s (q - 32) |
| IQ4_NL | 32 | 18 | d, 16 nibble pairs that choose one of 16 whole numbers v each | d v |
| IQ4_XS | 256 | 136 | d, 8 high bit pairs of s, 8 nibbles of s, 128 nibble pairs | d (s - 32) v |
| MXFP4 | 32 | 17 | exponent e, 16 nibble pairs: floats f of four bits (e2m1) | 2^(e - 127) f |

IQ1, IQ2 and IQ3 are those of `ggml_grids`. Those that mean d times a whole number become
`QuantizedWeight`s: the scales of the others are products that float16 does not hold exactly.
Source: ggml-common.h and ggml-quants.c of ggml.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kernels import ggml_grids
from kernels.ggml_grids import Bytes, Floats, fields, half
from kernels.quantized import QuantizedWeight

Integers = NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class BlockType:
    """features and num_bytes of one block. decode: (blocks, num_bytes) to (blocks, features). bits:
    of the whole numbers that a block holds with one scale, at byte scale_at; 0: it holds none."""

    name: str
    features: int
    num_bytes: int
    decode: Callable[[Bytes], Floats]
    bits: int = 0
    integers: Callable[[Bytes], Integers] | None = None
    scale_at: int = 0


def dequantize(raw: Bytes, kind: BlockType) -> Floats:
    """(rows, bytes of a row) as stored to (rows, features)."""
    rows = raw.shape[0]
    return kind.decode(raw.reshape(-1, kind.num_bytes)).reshape(rows, -1)


def as_quantized(raw: Bytes, kind: BlockType) -> QuantizedWeight | None:
    """The same weight as integers in groups of a block, exactly; None where its format does not
    allow it."""
    if kind.integers is None:
        return None
    rows = raw.shape[0]
    blocks = raw.reshape(-1, kind.num_bytes)
    return QuantizedWeight(
        torch.from_numpy(kind.integers(blocks).reshape(rows, -1)),
        torch.from_numpy(half(blocks, kind.scale_at).reshape(rows, -1)),
        kind.bits,
        kind.features,
    )


def _whole(
    name: str,
    features: int,
    num_bytes: int,
    bits: int,
    integers: Callable[[Bytes], Integers],
    scale_at: int = 0,
) -> BlockType:
    def decode(blocks: Bytes) -> Floats:
        return half(blocks, scale_at) * integers(blocks).astype(np.float32)

    return BlockType(name, features, num_bytes, decode, bits, integers, scale_at)


def _nibbles(pairs: Bytes, run: int = 16) -> Bytes:
    """The halves of each run of bytes: first all low ones, then all high ones."""
    runs = pairs.reshape(len(pairs), -1, 1, run)
    shifts = np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
    return ((runs >> shifts) & np.uint8(15)).reshape(len(pairs), -1)


def _pairs(packed: Bytes) -> Bytes:
    """The bit pairs of each run of 32 bytes: first all lowest ones."""
    runs = packed.reshape(len(packed), -1, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    return ((runs >> shifts) & np.uint8(3)).reshape(len(packed), -1)


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


def _q4_0(blocks: Bytes) -> Integers:
    return _nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8)


def _q4_1(blocks: Bytes) -> Floats:
    return half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + half(blocks, 2)


def _q5_0(blocks: Bytes) -> Integers:
    values = _nibbles(blocks[:, 6:]) | _high_bits(blocks[:, 2:6])
    return values.view(np.int8) - np.int8(16)


def _q5_1(blocks: Bytes) -> Floats:
    values = _nibbles(blocks[:, 8:]) | _high_bits(blocks[:, 4:8])
    return half(blocks, 0) * values.astype(np.float32) + half(blocks, 2)


def _q8_0(blocks: Bytes) -> Integers:
    return blocks[:, 2:].copy().view(np.int8)  # not a view of the file


def _tq1_0(blocks: Bytes) -> Integers:
    """A digit is what remains above a byte once those before it are shifted out."""
    digits = []
    for begin, end, run, count in ((0, 32, 32, 5), (32, 48, 16, 5), (48, 52, 4, 4)):
        powers = np.array([1, 3, 9, 27, 81][:count], np.uint8)[:, None]
        digits.append((blocks[:, begin:end].reshape(-1, 1, run) * powers).reshape(len(blocks), -1))
    thirds = np.concatenate(digits, axis=1).astype(np.uint16) * np.uint16(3) >> np.uint16(8)
    return thirds.astype(np.int8) - np.int8(1)


def _tq2_0(blocks: Bytes) -> Integers:
    return _pairs(blocks[:, :64]).view(np.int8) - np.int8(1)


def _iq4_nl(blocks: Bytes) -> Integers:
    return _WHOLE_NUMBERS[_nibbles(blocks[:, 2:])]


def _iq4_xs(blocks: Bytes) -> Floats:
    num = len(blocks)
    high = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16)
    low = fields(blocks[:, 4:8], (0, 4), 15).reshape(num, 8)
    scales = low | (fields(high, range(0, 16, 2), 3).reshape(num, 8) << 4).astype(np.uint8)
    steps = half(blocks, 0) * (scales.view(np.int8) - np.int8(32)).astype(np.float32)
    values = _WHOLE_NUMBERS[_nibbles(blocks[:, 8:])].astype(np.float32)
    return (steps[:, :, None] * values.reshape(num, 8, 32)).reshape(num, -1)


def _q2_k(blocks: Bytes) -> Floats:
    num, scales = len(blocks), blocks[:, :16]
    step = (half(blocks, 80) * (scales & 15).astype(np.float32))[:, :, None]
    offset = (half(blocks, 82) * (scales >> 4).astype(np.float32))[:, :, None]
    values = _pairs(blocks[:, 16:80]).reshape(num, 16, 16).astype(np.float32)
    return (step * values - offset).reshape(num, -1)


def _q3_k(blocks: Bytes) -> Floats:
    """Of the scales, 8 bytes have the low nibbles, four the upper pairs of bits."""
    num, packed = len(blocks), blocks[:, 96:108]
    low = (packed[:, None, :8] >> np.array([[0], [4]], np.uint8)) & np.uint8(15)
    high = (packed[:, None, 8:] >> np.array([[0], [2], [4], [6]], np.uint8)) & np.uint8(3)
    scales = low.reshape(num, 16) | (high.reshape(num, 16) << np.uint8(4))
    step = half(blocks, 108) * (scales.view(np.int8) - np.int8(32)).astype(np.float32)
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    upper = ((blocks[:, None, :32] >> shifts) & np.uint8(1)).reshape(num, -1) << np.uint8(2)
    values = ((_pairs(blocks[:, 32:96]) | upper).view(np.int8) - np.int8(4)).astype(np.float32)
    return (step[:, :, None] * values.reshape(num, 16, 16)).reshape(num, -1)


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
    step = (half(blocks, 0) * scale.astype(np.float32))[:, :, None]
    offset = (half(blocks, 2) * minimum.astype(np.float32))[:, :, None]
    runs = values.reshape(len(blocks), 8, 32).astype(np.float32)
    return (step * runs - offset).reshape(len(blocks), -1)


def _q6_k(blocks: Bytes) -> Floats:
    num = len(blocks)
    low, high = _nibbles(blocks[:, :128], 64), _pairs(blocks[:, 128:192])
    values = (low | (high << np.uint8(4))).astype(np.float32) - 32
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    steps = (half(blocks, 208) * scales)[:, :, None]
    return (steps * values.reshape(num, 16, 16)).reshape(num, -1)


def _mxfp4(blocks: Bytes) -> Floats:
    exponents = blocks[:, :1].astype(np.int32) - 127
    return np.ldexp(_FLOATS_OF_FOUR_BITS[_nibbles(blocks[:, 1:])], exponents)


_FLOATS_OF_FOUR_BITS = np.array(
    [sign * size for sign in (1, -1) for size in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], np.float32
)

_WHOLE_NUMBERS = np.array(  # of IQ4_NL and IQ4_XS
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)

# By type id in a file.
BLOCK_TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4, _floats),
    1: BlockType("F16", 1, 2, _halves),
    2: _whole("Q4_0", 32, 18, 4, _q4_0),
    3: BlockType("Q4_1", 32, 20, _q4_1),
    6: _whole("Q5_0", 32, 22, 8, _q5_0),
    7: BlockType("Q5_1", 32, 24, _q5_1),
    8: _whole("Q8_0", 32, 34, 8, _q8_0),
    10: BlockType("Q2_K", 256, 84, _q2_k),
    11: BlockType("Q3_K", 256, 110, _q3_k),
    12: BlockType("Q4_K", 256, 144, _q4_k),
    13: BlockType("Q5_K", 256, 176, _q5_k),
    14: BlockType("Q6_K", 256, 210, _q6_k),
    16: BlockType("IQ2_XXS", 256, 66, ggml_grids.iq2_xxs),
    17: BlockType("IQ2_XS", 256, 74, ggml_grids.iq2_xs),
    18: BlockType("IQ3_XXS", 256, 98, ggml_grids.iq3_xxs),
    19: BlockType("IQ1_S", 256, 50, ggml_grids.iq1_s),
    20: _whole("IQ4_NL", 32, 18, 8, _iq4_nl),
    21: BlockType("IQ3_S", 256, 110, ggml_grids.iq3_s),
    22: BlockType("IQ2_S", 256, 82, ggml_grids.iq2_s),
    23: BlockType("IQ4_XS", 256, 136, _iq4_xs),
    29: BlockType("IQ1_M", 256, 56, ggml_grids.iq1_m),
    30: BlockType("BF16", 1, 2, _bfloats),
    34: _whole("TQ1_0", 256, 54, 4, _tq1_0, 52),
    35: _whole("TQ2_0", 256, 66, 4, _tq2_0, 64),
    39: BlockType("MXFP4", 32, 17, _mxfp4),
}
# Names of unsupported type ids, for error messages.
OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 40: "NVFP4",
    41: "Q1_0",
}  # fmt: skip
