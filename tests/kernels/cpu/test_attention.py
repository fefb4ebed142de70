"""Paged attention in C++: against float64, and bit for bit the same in every company."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch

from kernels.cpu import library

if library.load() is None:
    pytest.skip("the CPU library is not built here", allow_module_level=True)

from kernels.cpu.backend import CpuBackend
from kernels.interface import AttentionShape, KVLayer
from tests.kernels.cpu.batches import (
    SETS,
    identity_rotation,
    instruction_set,
    make_batch,
    make_tables,
    reference_attention,
    threads,
)

CPU = torch.device("cpu")
BACKEND = CpuBackend()
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
INT8_TOLERANCE = 3e-2


@pytest.fixture(params=SETS, ids=lambda isa: isa.name.lower(), autouse=True)
def _isa(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    with instruction_set(request.param):
        yield


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

    def expected(self, s: int) -> torch.Tensor:
        return reference_attention(self.q[s], self.k[s], self.v[s], 0, self.shape)


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
    generator = torch.Generator().manual_seed(seed)
    tables, num_blocks = make_tables(lengths, block_size, seed)
    layer = BACKEND.allocate_kv(1, num_blocks, block_size, shape, kv_dtype or dtype, CPU)[0]

    def draw(count: int) -> list[torch.Tensor]:
        return [torch.randn(n, count, dim, generator=generator).to(dtype) for n in lengths]

    q, k, v = draw(num_heads), draw(num_kv_heads), draw(num_kv_heads)
    return Sequences(q, k, v, tables, layer, block_size, shape, dtype)


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = (got.double() - expected).abs().max().item()
    assert error <= tolerance * max(1.0, expected.abs().max().item()), error


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS = [(9, 3, 64), (4, 4, 80), (8, 1, 128), (2, 2, 8), (6, 2, 72), (3, 1, 256), (50, 1, 16)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_hybrid_batch(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    sequences = make([1, 17, 40, 290, 33], heads, dtype)
    for s, length in enumerate([1, 17, 40]):
        if length > 1:
            sequences.run([(s, 0, length - 1)])
    sequences.run([(3, 0, 251)])
    outs = sequences.run([(0, 0, 1), (1, 16, 1), (2, 39, 1), (3, 251, 39), (4, 0, 33)])
    starts = [0, 16, 39, 251, 0]
    for s, (out, start) in enumerate(zip(outs, starts, strict=True)):
        close(out, sequences.expected(s)[start:], TOLERANCE[dtype])


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 24, 32, 48, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_block_sizes(block_size: int, dtype: torch.dtype) -> None:
    sequences = make([300, 5], (6, 2, 40), dtype, block_size)
    sequences.run([(0, 0, 77)])
    (first, second) = sequences.run([(0, 77, 223), (1, 0, 5)])
    close(first, sequences.expected(0)[77:], TOLERANCE[dtype])
    close(second, sequences.expected(1), TOLERANCE[dtype])


@pytest.mark.parametrize("window", [1, 5, 16, 100, 257, 10_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sliding_window(window: int, dtype: torch.dtype) -> None:
    sequences = make([600], (4, 2, 32), dtype, sliding_window=window)
    (out,) = sequences.run([(0, 0, 600)])
    close(out, sequences.expected(0), TOLERANCE[dtype])


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["same", "int8"])
def test_softcap(kv_dtype: torch.dtype | None) -> None:
    sequences = make([300], (4, 2, 32), torch.float32, kv_dtype=kv_dtype, softcap=2.0)
    sequences.q[0] *= 5  # far into the cap
    (out,) = sequences.run([(0, 0, 300)])
    close(out, sequences.expected(0), TOLERANCE[torch.float32] if kv_dtype is None else 2e-2)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sinks(dtype: torch.dtype, window: int | None) -> None:
    """Far below and above all scores, and between; tasks of one partition and of several."""
    sinks = torch.tensor([-90.0, -1.0, 0.0, 2.5, 5.0, 60.0])
    sequences = make([600, 30], (6, 2, 40), dtype, sliding_window=window, sinks_N=sinks)
    sequences.run([(0, 0, 599)])
    decode, prefill = sequences.run([(0, 599, 1), (1, 0, 30)])
    close(decode, sequences.expected(0)[599:], TOLERANCE[dtype])
    close(prefill, sequences.expected(1), TOLERANCE[dtype])
    assert prefill.view(30, 6, 40)[:, 5].float().abs().max() < 1e-20  # all its weight is the sink's


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_cache(dtype: torch.dtype, block_size: int) -> None:
    sequences = make([300, 40], (6, 2, 64), dtype, block_size, kv_dtype=torch.int8)
    sequences.run([(0, 0, 299)])
    decode, prefill = sequences.run([(0, 299, 1), (1, 0, 40)])
    close(decode, sequences.expected(0)[299:], INT8_TOLERANCE)
    close(prefill, sequences.expected(1), INT8_TOLERANCE)


@pytest.mark.parametrize("kv_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cache_of_another_type(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    sequences = make([100], (4, 2, 32), dtype, kv_dtype=kv_dtype)
    (out,) = sequences.run([(0, 0, 100)])
    close(out, sequences.expected(0), max(TOLERANCE[dtype], TOLERANCE[kv_dtype]))


def test_large_scores_do_not_overflow() -> None:
    sequences = make([64], (2, 1, 64), torch.float32)
    sequences.q[0] *= 300
    (out,) = sequences.run([(0, 0, 64)])
    assert torch.isfinite(out).all()
    close(out, sequences.expected(0), 1e-3)


@pytest.mark.parametrize("block_size", [16, 5])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.int8)],
    ids=str,
)
def test_what_a_former_owner_left_in_a_block_is_never_read(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, block_size: int
) -> None:
    clean = make([40, 3], (4, 2, 32), dtype, block_size, kv_dtype)
    dirty = make([40, 3], (4, 2, 32), dtype, block_size, kv_dtype)
    for block in range(dirty.layer.data.shape[0]):  # type: ignore[attr-defined]
        poison = BACKEND.read_block(dirty.layer, block)
        poison.fill_(0xFF)  # NaN in every floating dtype
        BACKEND.write_block(dirty.layer, block, poison)
    work = [(1, 0, 3), (0, 0, 21)]
    for a, b in zip(clean.run(work), dirty.run(work), strict=True):
        assert torch.isfinite(a).all()
        assert torch.equal(a, b)
    for a, b in zip(clean.run([(0, 21, 1)]), dirty.run([(0, 21, 1)]), strict=True):
        assert torch.equal(a, b)


LAYOUTS = [
    (torch.bfloat16, None, 16),
    (torch.float32, None, 16),
    (torch.float16, None, 16),
    (torch.bfloat16, torch.int8, 16),
    (torch.bfloat16, None, 5),
]


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(("dtype", "kv_dtype", "block_size"), LAYOUTS, ids=str)
def test_a_token_has_the_same_bits_in_every_company(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, block_size: int, window: int | None
) -> None:
    """Whole prompt at once, in chunks of 64, 7 and 1, among neighbors, on 1 to 3 threads."""
    length = 560
    sinks = None if window is None else torch.linspace(-2, 4, 6)

    def fresh() -> Sequences:
        return make([length, 530, 9], (6, 2, 64), dtype, block_size, kv_dtype,
                    sliding_window=window, sinks_N=sinks)  # fmt: skip

    with threads(1):
        (whole,) = fresh().run([(0, 0, length)])
    assert torch.isfinite(whole).all()
    for chunk, first in ((64, 64), (7, 200), (1, 500)):
        with threads(3):
            sequences = fresh()
            bounds = [0, *range(first, length, chunk), length]
            pieces = [
                sequences.run([(0, start, end - start)])[0] for start, end in pairwise(bounds)
            ]
        assert torch.equal(torch.cat(pieces), whole), chunk
    with threads(2):
        sequences = fresh()
        sequences.run([(1, 0, 529)])
        alone = sequences.run([(1, 529, 1)])[0]
        sequences = fresh()
        sequences.run([(1, 0, 300), (2, 0, 8), (0, 0, 100)])
        sequences.run([(2, 8, 1), (0, 100, 310), (1, 300, 229)])
        mixed = sequences.run([(1, 529, 1), (0, 410, 150)])
    assert torch.equal(mixed[0], alone)
    assert torch.equal(mixed[1], whole[410:])


def test_blocks_are_copied_in_order_and_swapped_whole() -> None:
    sequences = make([64], (4, 2, 32))
    layers = [sequences.layer]
    sequences.run([(0, 0, 64)])
    first, second, third = (BACKEND.read_block(layers[0], b) for b in range(3))
    BACKEND.copy_blocks(layers, [(0, 1), (1, 2)])
    assert torch.equal(BACKEND.read_block(layers[0], 2), first)
    BACKEND.write_block(layers[0], 2, third)
    BACKEND.write_block(layers[0], 1, second)
    assert torch.equal(BACKEND.read_block(layers[0], 1), second)
    assert torch.equal(BACKEND.read_block(layers[0], 2), third)
    with pytest.raises(IndexError, match="outside"):
        BACKEND.copy_blocks(layers, [(0, 99)])
    with pytest.raises(ValueError, match="bytes"):
        BACKEND.write_block(layers[0], 0, first[:-1])


def test_bytes_of_a_block() -> None:
    shape = AttentionShape(9, 3, 64, scale=0.125)
    assert BACKEND.kv_block_bytes(16, shape, torch.bfloat16) == 2 * 16 * 3 * 64 * 2
    assert BACKEND.kv_block_bytes(16, shape, torch.int8) == 2 * 16 * 3 * (64 + 4)
    layers = BACKEND.allocate_kv(2, 5, 16, shape, torch.bfloat16, CPU)
    assert [tuple(layer.data.shape) for layer in layers] == [(5, 12_288)] * 2


def test_refusals_name_what_is_wrong() -> None:
    sequences = make([20], (4, 2, 32))
    batch = make_batch([(0, 20)], sequences.tables, 16)
    q = sequences.q[0]

    def attend(**changes: object) -> None:
        BACKEND.attention(q, replace(batch, **changes), sequences.layer, sequences.shape)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="starts_S"):
        attend(starts_S=batch.starts_S.long())
    with pytest.raises(ValueError, match="block_tables_SB"):
        attend(block_tables_SB=batch.block_tables_SB.t())
    with pytest.raises(ValueError, match="cannot hold"):
        attend(max_kv_length=10_000)
    with pytest.raises(ValueError, match="q_TND"):
        BACKEND.attention(q[:, :2], batch, sequences.layer, sequences.shape)
    with pytest.raises(ValueError, match="cache holds"):
        BACKEND.attention(q, batch, sequences.layer, replace(sequences.shape, num_kv_heads=4))
    with pytest.raises(ValueError, match="sinks_N must be 4"):
        BACKEND.attention(
            q, batch, sequences.layer, replace(sequences.shape, sinks_N=torch.zeros(2))
        )
    with pytest.raises(ValueError, match="head_dim"):
        BACKEND.allocate_kv(1, 1, 16, AttentionShape(1, 1, 12, 1.0), torch.float32, CPU)
    with pytest.raises(TypeError, match="cache of object"):
        BACKEND.attention(q, batch, object(), sequences.shape)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("length", [1, 3, 9, 16])
def test_the_next_owner_of_a_block_sees_nothing_of_an_overflow(
    length: int, kv_dtype: torch.dtype | None
) -> None:
    """A block is not cleared between owners: what lies behind the new one's end must not count."""
    sequences = make([16, length], (4, 2, 64), kv_dtype=kv_dtype)
    sequences.k[0].fill_(float("inf"))
    sequences.v[0].fill_(float("nan"))
    sequences.run([(0, 0, 16)])
    sequences.tables[1, 0] = sequences.tables[0, 0]
    (out,) = sequences.run([(1, 0, length)])
    close(out, sequences.expected(1), INT8_TOLERANCE if kv_dtype else TOLERANCE[torch.bfloat16])
