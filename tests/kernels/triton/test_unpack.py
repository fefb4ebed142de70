"""Every code as a number, exactly, with every zero."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be tested")

import triton
import triton.language as tl

from kernels.triton.unpack import unpack_fp8, unpack_int4, unpack_int8

# Set by tests/conftest.py where there is no GPU.
ON_GPU = os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter rounds bfloat16 wrongly.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]


@triton.jit
def _unpack_kernel(
    codes_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    out_ptr: tl.tensor,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    row = tl.arange(0, ROWS)[:, None]
    place = row * 256 + tl.arange(0, 256)[None, :]
    codes = tl.load(codes_ptr + place)
    zeros = tl.load(zeros_ptr + row)
    like = tl.zeros((1, 1), out_ptr.dtype.element_ty)
    if KIND == "int4":
        low, high = unpack_int4(codes, zeros, like)
        tl.store(out_ptr + place, low)
        tl.store(out_ptr + ROWS * 256 + place, high)
    elif KIND == "int8":
        tl.store(out_ptr + place, unpack_int8(codes, zeros, like))
    else:
        tl.store(out_ptr + place, unpack_fp8(codes, like))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_every_code_is_exact(kind: str, dtype: torch.dtype) -> None:
    zeros = [0, 1, -1, 7, -8, 15, -128, 127] if kind == "int8" else [0, 1, -1, 7, -8, 8, -7, 3]
    zeros_R1 = torch.tensor(zeros, dtype=torch.int8, device=DEVICE)[:, None]
    byte_RC = torch.arange(256, device=DEVICE).repeat(8, 1).to(torch.uint8)
    codes_RC = byte_RC.view(torch.int8) if kind == "int8" else byte_RC.clone()
    if kind == "int4":
        exact = torch.stack((byte_RC & 15, byte_RC >> 4)).float() - 8 - zeros_R1
    elif kind == "int8":
        exact = codes_RC.float() - zeros_R1
    else:
        codes_RC[:, [0x7F, 0xFF]] = 0  # NaN is never stored
        exact = codes_RC.view(torch.float8_e4m3fn).float()
    out = torch.full((2 if kind == "int4" else 1, 8, 256), torch.nan, dtype=dtype, device=DEVICE)
    _unpack_kernel[(1,)](codes_RC, zeros_R1, out, KIND=kind, ROWS=8)
    assert torch.equal(out.float(), exact.expand_as(out))
