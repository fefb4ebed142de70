"""Queries of layers without keys: rotated as those of other layers, alike in any batch."""

from __future__ import annotations

import pytest
import torch

from kernels.interface import AttentionShape
from kernels.registry import resolve_backend
from tests.kernels.cpu.batches import make_batch, make_tables

CPU = torch.device("cpu")


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("norms_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_queries_alone(backend: str, norms_last: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    made = resolve_backend(backend, "cpu", dtype, 16, None)
    shape = AttentionShape(4, 2, 24, 1.0, norms_last=norms_last)
    lengths = (21, 5)
    tables, num_blocks = make_tables(lengths, 16)
    layer = made.allocate_kv(1, num_blocks, 16, shape, dtype, CPU)[0]
    angles = torch.rand(21, 12) * 6
    table_PD = torch.cat((angles.cos(), angles.sin()), dim=1)
    norm_D = torch.rand(24) + 0.5
    qkv_TX = torch.randn(26, 8 * 24).to(dtype)
    q_TX = qkv_TX[:, : 4 * 24].contiguous()
    batch = make_batch([(0, 21), (0, 5)], tables, 16)
    for norms in ((None, None), (norm_D, norm_D)):
        whole = made.rope_and_cache(qkv_TX, table_PD, batch, layer, shape, *norms)
        cached = made.read_block(layer, 0).clone()
        alone = made.rope_and_cache(q_TX, table_PD, batch, None, shape, norms[0])
        # The C++ of whole layers does not round between norm and rotation.
        tolerance = 2e-6 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(alone, whole, atol=tolerance, rtol=tolerance)
        assert torch.equal(made.read_block(layer, 0), cached)
        last = make_batch([(20, 1)], tables[:1], 16)
        row = made.rope_and_cache(q_TX[20:21], table_PD, last, None, shape, norms[0])
        assert torch.equal(row[0], alone[20])
