"""Codes of packed weights as numbers of a 16-bit type, four at a time.

A GPU converts between integers and floats at a fraction of its rate, and one number per
instruction; for int4 products that alone would take longer than to stream the weights. So bytes are
moved into the bits of numbers instead, and two numbers at a time are corrected by one
multiplication with addition (Kim et al., "Who Says Elephants Can't Run", 2022; Marlin). All of it
is exact. Under Triton's interpreter, which has no instructions, and for float32 each code is
converted by itself.
"""

import os

import triton
import triton.language as tl

from kernels.triton.float8 import from_e4m3

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

# A byte c of at most 127 below the byte 0x43 is the bfloat16 128 + c; below 0x64, any is the
# float16 1024 + c. The offset is added to it.
_INT4 = """{{
.reg .b32 half, one;
mov.b32 one, {one};
and.b32 half, $4, 0x0F0F0F0F;
prmt.b32 $0, half, {high}, 0x4140;
prmt.b32 $1, half, {high}, 0x4342;
shr.b32 half, $4, 4;
and.b32 half, half, 0x0F0F0F0F;
prmt.b32 $2, half, {high}, 0x4140;
prmt.b32 $3, half, {high}, 0x4342;
fma.rn.{type}x2 $0, $0, one, $5;
fma.rn.{type}x2 $1, $1, one, $6;
fma.rn.{type}x2 $2, $2, one, $5;
fma.rn.{type}x2 $3, $3, one, $6;
}}"""
_INT4_BFLOAT16 = tl.constexpr(_INT4.format(one="0x3F803F80", high="0x43434343", type="bf16"))
_INT4_FLOAT16 = tl.constexpr(_INT4.format(one="0x3C003C00", high="0x64646464", type="f16"))
# A byte c at the end of 0x4B000000 is the float32 2**23 + c.
_INT8_BFLOAT16 = tl.constexpr("""{
.reg .b32 codes, a, b;
xor.b32 codes, $2, 0x80808080;
prmt.b32 a, codes, 0x4B000000, 0x7440;
prmt.b32 b, codes, 0x4B000000, 0x7441;
add.f32 a, a, $3;
add.f32 b, b, $4;
cvt.rn.bf16x2.f32 $0, b, a;
prmt.b32 a, codes, 0x4B000000, 0x7442;
prmt.b32 b, codes, 0x4B000000, 0x7443;
add.f32 a, a, $5;
add.f32 b, b, $6;
cvt.rn.bf16x2.f32 $1, b, a;
}""")
_INT8_FLOAT16 = tl.constexpr("""{
.reg .b32 codes, one;
mov.b32 one, 0x3C003C00;
xor.b32 codes, $2, 0x80808080;
prmt.b32 $0, codes, 0x64646464, 0x4140;
prmt.b32 $1, codes, 0x64646464, 0x4342;
fma.rn.f16x2 $0, $0, one, $3;
fma.rn.f16x2 $1, $1, one, $4;
}""")
# The sign stays the highest bit; exponent and mantissa follow that of a type whose exponent has
# another bias, and more bits if it is bfloat16. Subnormals are products like others.
_FP8_PAIR = """prmt.b32 pair, $2, 0, {bytes};
and.b32 sign, pair, 0x80008000;
shr.b32 pair, pair, {shift};
and.b32 pair, pair, {mask};
or.b32 pair, pair, sign;
fma.rn.{type}x2 ${place}, pair, scale, zero;
"""


def _fp8(type: str, scale: str, shift: int, mask: str) -> str:
    pairs = ((0, "0x1404"), (1, "0x3424"))
    return (
        "{\n.reg .b32 pair, sign, scale, zero;\n"
        f"mov.b32 scale, {scale};\nmov.b32 zero, 0x80008000;\n"
        + "".join(
            _FP8_PAIR.format(place=place, bytes=bytes_, shift=shift, mask=mask, type=type)
            for place, bytes_ in pairs
        )
        + "}"
    )


_FP8_BFLOAT16 = tl.constexpr(_fp8("bf16", "0x7B807B80", 4, "0x07F007F0"))  # scale: 2**120
_FP8_FLOAT16 = tl.constexpr(_fp8("f16", "0x5C005C00", 1, "0x3F803F80"))  # scale: 2**8


@triton.jit
def unpack_int4(codes: tl.tensor, zeros: tl.tensor, like: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Low and high halves of bytes, each less 8 and less a zero of int8, in the type of `like`;
    zeros: broadcast to codes."""
    if _INTERPRETED or like.dtype == tl.float32:
        low = ((codes & 15).to(tl.int8) - 8 - zeros).to(like.dtype)
        high = ((codes >> 4).to(tl.int8) - 8 - zeros).to(like.dtype)
    elif like.dtype == tl.bfloat16:
        offset, _ = tl.broadcast(-136.0 - zeros.to(tl.float32), codes)
        low, high = tl.inline_asm_elementwise(
            _INT4_BFLOAT16, "=&r,=&r,=&r,=&r,r,r,r", [codes, offset.to(tl.bfloat16)],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        offset, _ = tl.broadcast(-1032.0 - zeros.to(tl.float32), codes)
        low, high = tl.inline_asm_elementwise(
            _INT4_FLOAT16, "=&r,=&r,=&r,=&r,r,r,r", [codes, offset.to(tl.float16)],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
        )  # fmt: skip
    return low, high


@triton.jit
def unpack_int8(codes: tl.tensor, zeros: tl.tensor, like: tl.tensor) -> tl.tensor:
    """int8 codes less a zero of int8, in the type of `like`; zeros: broadcast to codes."""
    if _INTERPRETED or like.dtype == tl.float32:
        value = (codes.to(tl.int16) - zeros.to(tl.int16)).to(like.dtype)
    elif like.dtype == tl.bfloat16:
        offset, _ = tl.broadcast(-8388736.0 - zeros.to(tl.float32), codes)
        value = tl.inline_asm_elementwise(
            _INT8_BFLOAT16, "=&r,=&r,r,r,r,r,r", [codes, offset],
            dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        offset, _ = tl.broadcast(-1152.0 - zeros.to(tl.float32), codes)
        value = tl.inline_asm_elementwise(
            _INT8_FLOAT16, "=&r,=&r,r,r,r", [codes, offset.to(tl.float16)],
            dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    return value


@triton.jit
def unpack_fp8(codes: tl.tensor, like: tl.tensor) -> tl.tensor:
    """e4m3 codes in uint8, in the type of `like`."""
    if _INTERPRETED or like.dtype == tl.float32:
        value = from_e4m3(codes).to(like.dtype)
    elif like.dtype == tl.bfloat16:
        value = tl.inline_asm_elementwise(
            _FP8_BFLOAT16, "=&r,=&r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        value = tl.inline_asm_elementwise(
            _FP8_FLOAT16, "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=True, pack=4
        )
    return value
