"""fp8 (e4m3) as bytes: conversions by integer arithmetic, the same on every GPU, and where there
are instructions for it, which caches are read by.

The bits of an e4m3 number, shifted left by 7, are a float16 of 2**-8 times its value (the exponent
biases differ by 8), subnormals included. That makes fp8 weights and caches available on
GPUs without fp8 instructions, and lets the interpreter check them bit for bit.
"""

import triton
import triton.language as tl

BY_ARITHMETIC = tl.constexpr(1)
BY_INSTRUCTION = tl.constexpr(2)


def kind_of(is_float8: bool, arch: int) -> int:
    """How a kernel reads a cache: 0 where it is not fp8, else one of the two kinds above.

    Arithmetic takes eight operations per number, more than attention itself does in a decode.
    """
    if not is_float8:
        return 0
    return int((BY_INSTRUCTION if arch >= 89 else BY_ARITHMETIC).value)


@triton.jit
def from_e4m3(code: tl.tensor) -> tl.tensor:
    """uint8 codes -> float32. NaN codes are never written, so never read."""
    wide = code.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def to_e4m3(x: tl.tensor) -> tl.tensor:
    """float32 -> uint8 codes, saturating, rounding to nearest even."""
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Three bits behind the leading one, with the exponent's bias of 7 instead of 127.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 multiples of 2**-9, which is what the last bit of 2**14 is worth.
    lifted = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, lifted, normal)
    return (((bits >> 24) & 0x80) | code).to(tl.uint8)
