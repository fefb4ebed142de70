"""For tests of the CPU backend's attention: sequences in a cache, and their float64 reference."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from kernels.cpu.backend import CpuBackend
from kernels.interface import AttentionShape, KVLayer
from tests.kernels.cpu.batches import (
    identity_rotation,
    make_batch,
    make_tables,
    reference_attention,
)

CPU = torch.device("cpu")
BACKEND = CpuBackend()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
INT8_TOLERANCE = 3e-2


@dataclass
class Sequences:
    """Random q, k, v of some sequences, and a cache to put them in."""

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    tables: torch.Tensor
    layer: KVLayer
    block_size: int
    shape: AttentionShape
    dtype: torch.dtype

    def run(self, work: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """work: (sequence, start, number of tokens); stores K and V, returns the outputs."""
        rows = torch.tensor([s for s, _, _ in work])
        slices = [(start, count) for _, start, count in work]
        batch = make_batch(slices, self.tables[rows], self.block_size)
        parts = [
            torch.cat([x[s][start : start + n].flatten(1) for x in (self.q, self.k, self.v)], 1)
            for s, start, n in work
        ]
        qkv = torch.cat(parts).contiguous()
        table = identity_rotation(int(batch.max_kv_length), self.shape.head_dim)
        q = BACKEND.rope_and_cache(qkv, table, batch, self.layer, self.shape)
        out = BACKEND.attention(q, batch, self.layer, self.shape)
        return list(out.split([n for _, _, n in work]))

    def expected(self, s: int, start: int = 0) -> torch.Tensor:
        """The rows from position `start` on."""
        return reference_attention(self.q[s][start:], self.k[s], self.v[s], start, self.shape)


def make(
    lengths: list[int],
    heads: tuple[int, int, int],
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 16,
    kv_dtype: torch.dtype | None = None,
    seed: int = 0,
    **options: float | torch.Tensor | None,
) -> Sequences:
    num_heads, num_kv_heads, dim = heads
    shape = AttentionShape(num_heads, num_kv_heads, dim, scale=dim**-0.5, **options)  # type: ignore[arg-type]
    tables, num_blocks = make_tables(lengths, block_size, seed)
    layer = BACKEND.allocate_kv(1, num_blocks, block_size, shape, kv_dtype or dtype, CPU)[0]

    q, k, v = ([x.clone() for x in part] for part in _draw(tuple(lengths), heads, dtype, seed))
    return Sequences(q, k, v, tables, layer, block_size, shape, dtype)


@functools.lru_cache(maxsize=4)
def _draw(
    lengths: tuple[int, ...], heads: tuple[int, int, int], dtype: torch.dtype, seed: int
) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads, dim = heads
    return [
        [torch.randn(n, count, dim, generator=generator).to(dtype) for n in lengths]
        for count in (num_heads, num_kv_heads, num_kv_heads)
    ]


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = (got.double() - expected).abs().max().item()
    assert error <= tolerance * max(1.0, expected.abs().max().item()), error


def alibi_table(num_heads: int, num_positions: int) -> torch.Tensor:
    """Biases that fall by 0.7 a token in the first head, by less in the others."""
    return 0.7 ** torch.arange(1, num_heads + 1)[:, None] * torch.arange(num_positions)
