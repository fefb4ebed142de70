"""Decodes and chunks in one launch of attention, against two launches and the reference."""

from __future__ import annotations

import math

import torch

from app.bench.gpu.checks import (
    BOUNDS,
    AttentionCase,
    CheckResult,
    attention_inputs,
    poisoned_outputs,
)
from kernels.triton import reference
from kernels.triton.backend import TritonBackend
from kernels.triton.hybrid import fits


def shares_launch(case: AttentionCase, dtype: torch.dtype) -> bool:
    """Whether the batch, as far as the host knows it, holds decodes and chunks, in a shape for
    which they can share a launch."""
    lengths = [length for _, length in case.slices]
    if case.pad is None:
        both = lengths[0] == 1 and max(lengths) > 1
    else:
        both = sum(lengths) + case.pad[0] > len(lengths) + case.pad[1]
    return both and fits(case.shape, dtype)


def check_one_launch(case: AttentionCase, dtype: torch.dtype, device: torch.device) -> CheckResult:
    """One launch against the reference; the error is infinite where a bit differs from the result
    of two launches."""
    two, one = TritonBackend(one_launch=False), TritonBackend(one_launch=True)
    q_TND, batch, cache = attention_inputs(case, two, dtype, device)
    shape = case.drawn_shape(device)
    real = sum(length for _, length in case.slices)
    with poisoned_outputs():
        out, wanted = (
            backend.attention(q_TND, batch, cache, shape)[:real] for backend in (one, two)
        )
    expected = reference.attention(q_TND, batch, cache, shape)[:real]
    error = reference.relative_error(out, expected) if torch.equal(out, wanted) else math.inf
    name = f"triton attention, one launch: {case.name}"
    return CheckResult(name, str(dtype).removeprefix("torch."), error, BOUNDS[dtype])
