"""Attention in PyTorch against float64: ALiBi, with everything that it meets, and chunks."""

from __future__ import annotations

import pytest
import torch

from kernels.interface import AttentionShape
from kernels.torch.backend import TorchBackend
from tests.kernels.cpu.batches import (
    identity_rotation,
    make_batch,
    make_tables,
    reference_attention,
)

BACKEND, CPU = TorchBackend(), torch.device("cpu")
LENGTHS = (600, 41, 5, 330)


@pytest.mark.parametrize("chunk", [1, 20, 256])
def test_chunked_windows(chunk: int) -> None:
    run_and_compare(AttentionShape(6, 2, 32, 32**-0.5, chunk, chunked=True))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("heads", [(4, 4, 16), (6, 6, 8), (6, 2, 32)], ids=str)
def test_alibi(heads: tuple[int, int, int], window: int | None) -> None:
    """The table ends with the longest sequence, in the middle of a block."""
    N, G, D = heads
    alibi_NP = 0.7 ** torch.arange(1, N + 1)[:, None] * torch.arange(max(LENGTHS))
    alibi_NP = alibi_NP.bfloat16().float()
    run_and_compare(AttentionShape(N, G, D, D**-0.5, window, alibi_NP=alibi_NP))


def run_and_compare(shape: AttentionShape) -> None:
    """Decodes of several lengths, and prompts longer than a chunk of rows."""
    torch.manual_seed(0)
    N, G, D = shape.num_heads, shape.num_kv_heads, shape.head_dim
    tables, num_blocks = make_tables(LENGTHS, 16)
    layer = BACKEND.allocate_kv(1, num_blocks, 16, shape, torch.float32, CPU)[0]
    qkvs = [torch.randn(length, (N + 2 * G) * D) for length in LENGTHS]

    def run(slices: list[tuple[int, int]]) -> list[torch.Tensor]:
        batch = make_batch(slices, tables, 16)
        rows = [qkv[a : a + n] for qkv, (a, n) in zip(qkvs, slices, strict=True)]
        table = identity_rotation(max(LENGTHS), D)
        q = BACKEND.rope_and_cache(torch.cat(rows), table, batch, layer, shape)
        out = BACKEND.attention(q, batch, layer, shape)
        return list(out.split([n for _, n in slices]))

    run([(0, 599), (0, 40), (0, 4), (0, 30)])
    starts = (599, 40, 4, 30)
    outs = run([(start, length - start) for start, length in zip(starts, LENGTHS, strict=True)])
    for qkv, start, out in zip(qkvs, starts, outs, strict=True):
        q, k, v = qkv.view(-1, N + 2 * G, D).split([N, G, G], 1)
        expected = reference_attention(q[start:], k, v, start, shape)
        torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=2e-6)
