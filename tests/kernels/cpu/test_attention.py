"""Paged attention in C++: against float64, and bit for bit the same in every company."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kernels.cpu import library

if library.load() is None:
    pytest.skip("the CPU library is not built here", allow_module_level=True)

from kernels.interface import AttentionShape
from tests.kernels.cpu.batches import (
    EACH_SET,
    instruction_set,
    make_batch,
    reference_attention,
    threads,
)
from tests.kernels.cpu.sequences import (
    BACKEND,
    CPU,
    DTYPES,
    INT8_TOLERANCE,
    TOLERANCE,
    Sequences,
    alibi_table,
    close,
    make,
)

pytestmark = EACH_SET


@pytest.fixture(autouse=True)
def _isa(isa: library.Isa):  # type: ignore[no-untyped-def]
    with instruction_set(isa):
        yield


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
        close(out, sequences.expected(s, start), TOLERANCE[dtype])


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 24, 32, 48, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_block_sizes(block_size: int, dtype: torch.dtype) -> None:
    sequences = make([300, 5], (6, 2, 40), dtype, block_size)
    sequences.run([(0, 0, 77)])
    (first, second) = sequences.run([(0, 77, 223), (1, 0, 5)])
    close(first, sequences.expected(0, 77), TOLERANCE[dtype])
    close(second, sequences.expected(1), TOLERANCE[dtype])


@pytest.mark.parametrize("window", [1, 5, 16, 100, 257, 10_000])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_windows(window: int, dtype: torch.dtype, chunked: bool) -> None:
    sequences = make([600], (4, 2, 32), dtype, sliding_window=window, chunked=chunked)
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
    close(decode, sequences.expected(0, 599), TOLERANCE[dtype])
    close(prefill, sequences.expected(1), TOLERANCE[dtype])
    assert prefill.view(30, 6, 40)[:, 5].float().abs().max() < 1e-20  # all its weight is the sink's


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("heads", [(6, 6, 40), (6, 2, 64), (50, 1, 16)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [*((dtype, None) for dtype in DTYPES), (torch.bfloat16, torch.int8)],
    ids=str,
)  # fmt: skip
def test_alibi(
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    heads: tuple[int, int, int],
    window: int | None,
) -> None:
    """A table that ends with the last token, some of it in steps as Falcon's."""
    alibi = alibi_table(heads[0], 600)
    alibi[1::2] = alibi[1::2].bfloat16()
    options = {"sliding_window": window, "alibi_NP": alibi}
    sequences = make([600, 30], heads, dtype, kv_dtype=kv_dtype, **options)
    sequences.run([(0, 0, 599)])
    decode, prefill = sequences.run([(0, 599, 1), (1, 0, 30)])
    tolerance = TOLERANCE[dtype] if kv_dtype is None else INT8_TOLERANCE
    close(decode, sequences.expected(0, 599), tolerance)
    close(prefill, sequences.expected(1), tolerance)


def test_alibi_and_a_softcap() -> None:
    sequences = make([300], (4, 2, 32), torch.float32, softcap=2.0, alibi_NP=alibi_table(4, 300))
    (out,) = sequences.run([(0, 0, 300)])
    close(out, sequences.expected(0), TOLERANCE[torch.float32])


def test_alibi_is_exact_far_from_the_first_position() -> None:
    """Where a bias alone is 20000, float32 would round its sum with a score to 1/512."""
    length = 30_000
    options = {"sliding_window": 64, "alibi_NP": alibi_table(2, length)}
    sequences = make([length], (2, 2, 8), torch.float32, **options)
    (out,) = sequences.run([(0, 0, length)])
    q, k, v = sequences.q[0][-5:], sequences.k[0], sequences.v[0]
    close(out[-5:], reference_attention(q, k, v, length - 5, sequences.shape), 3e-6)


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_cache(dtype: torch.dtype, block_size: int) -> None:
    sequences = make([300, 40], (6, 2, 64), dtype, block_size, kv_dtype=torch.int8)
    sequences.run([(0, 0, 299)])
    decode, prefill = sequences.run([(0, 299, 1), (1, 0, 40)])
    close(decode, sequences.expected(0, 299), INT8_TOLERANCE)
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


@pytest.mark.parametrize(
    ("window", "options"),
    [
        (None, {}),
        (300, {"sinks_N": torch.linspace(-2, 4, 6)}),
        (None, {"alibi_NP": alibi_table(6, 530)}),
    ],
    ids=["plain", "window, sinks", "alibi"],
)
@pytest.mark.parametrize(("dtype", "kv_dtype", "block_size"), LAYOUTS, ids=str)
def test_a_token_has_the_same_bits_in_every_company(
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    block_size: int,
    window: int | None,
    options: dict[str, torch.Tensor],
) -> None:
    """Whole prompt at once, in chunks of 64, 7 and 1, among neighbors, on 1 to 3 threads."""
    length = 530

    def fresh() -> Sequences:
        return make([length, length, 9], (6, 2, 64), dtype, block_size, kv_dtype,
                    sliding_window=window, **options)  # fmt: skip

    with threads(1):
        (whole,) = fresh().run([(0, 0, length)])
    assert torch.isfinite(whole).all()
    for chunk, first in ((64, 64), (7, 400), (1, 505)):
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
        mixed = sequences.run([(1, 529, 1), (0, 410, 120)])
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
    for rows, message in ((3, "alibi_NP must be 4"), (4, "position 19 lies past the 10 of alibi")):
        shape = replace(sequences.shape, alibi_NP=torch.zeros(rows, 10))
        with pytest.raises(ValueError, match=message):
            BACKEND.attention(q, batch, sequences.layer, shape)
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
