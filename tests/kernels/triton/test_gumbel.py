"""float32 noise is close to the exact one wherever a token's hash falls."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be tested")

import triton
import triton.language as tl

from kernels.triton.gumbel import gumbel_scores, near_noise

# Set by tests/conftest.py where there is no GPU.
ON_GPU = os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


@triton.jit
def _noise_kernel(hash_ptr: tl.tensor, near_ptr: tl.tensor, exact_ptr: tl.tensor, N: tl.constexpr):
    n = tl.arange(0, N)
    hash_N = tl.load(hash_ptr + n).to(tl.uint32)
    one = tl.full((), 1.0, tl.float32)
    tl.store(near_ptr + n, near_noise(hash_N))
    tl.store(exact_ptr + n, gumbel_scores(0 * one, one, hash_N))


def test_the_noise_in_float32_misses_little() -> None:
    rng = np.random.default_rng(0)
    edges = [0, 1, 2, 1000, 2**31 - 1, 2**31, 2**32 - 1000, 2**32 - 2, 2**32 - 1]
    around = int(0.05 * 2**32)  # where the series ends
    hashes = [*edges, *range(around - 50, around + 50), *rng.integers(0, 2**32, 915).tolist()]
    hash_N = torch.tensor(hashes, device=DEVICE)
    near_N = torch.empty(len(hashes), device=DEVICE)
    exact_N = torch.empty(len(hashes), dtype=torch.float64, device=DEVICE)
    _noise_kernel[(1,)](hash_N, near_N, exact_N, N=len(hashes))
    v_N = (2 * hash_N.double() + 1) * 2.0**-33
    torch.testing.assert_close(exact_N, -(-(1 - v_N).log()).log(), rtol=1e-9, atol=1e-9)
    assert (near_N - exact_N).abs().max() < 2e-5
