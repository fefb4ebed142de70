"""Inputs are rounded to the reference's numbers, bit for bit."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be tested")

from app.bench.gpu.stored_case import RoundedCase
from kernels.triton.round_inputs import round_inputs

# Set by tests/conftest.py where there is no GPU.
DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GROUPS = (0, 8, 48, 128, 200)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_numbers_are_those_of_the_reference(group: int, dtype: torch.dtype) -> None:
    """To int8 and e4m3 by turns. Also of a row of zeros, and of one whose largest leaves little of
    the others."""
    torch.manual_seed(0)
    float8 = (GROUPS.index(group) + DTYPES.index(dtype)) % 2 == 1
    weight = RoundedCase(float8=float8, group_size=group, by_group=group > 0).draw(8, 300)
    x_TK = torch.randn(40, 300) * torch.logspace(-4, 3, 40)[:, None]
    x_TK[3] = 0
    x_TK[4, 7] = 1e4
    x_TK = x_TK.to(dtype)
    codes_TK, scales_TG = round_inputs(x_TK.to(DEVICE), group, weight.values_OK.dtype)
    made_TK = codes_TK.cpu().float() * scales_TG.cpu().repeat_interleave(group or 300, 1)[:, :300]
    assert torch.equal(made_TK, weight.round_inputs(x_TK))


def test_e4m3_rounds_once_and_halves_to_even() -> None:
    """All 16-bit floats up to the largest e4m3, of which many lie half way, and those beside."""
    halves = torch.arange(0, 0x5F01, dtype=torch.int16).view(torch.float16).float()
    beside = torch.cat([halves * (1 + s * 2.0**-20) for s in (-1, 0, 1)]).clamp(max=448)
    x_TK = torch.cat([beside, -beside]).view(6, -1)
    x_TK[:, 0] = 448  # of which the scale is 1
    codes_TK, _ = round_inputs(x_TK.to(DEVICE), 0, torch.float8_e4m3fn)
    expected = x_TK.to(torch.float8_e4m3fn)
    assert torch.equal(codes_TK.cpu().float(), expected.float())
