"""How FlashAttention-3 is called, against a fake that enforces what the library asks for."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels compute the rest")

from app.bench.gpu import checks
from app.bench.gpu.checks import AttentionCase
from app.bench.gpu.geometry import padded
from kernels.flash.backend import FlashBackend
from kernels.flash.flash3 import Flash3Attention, most_splits
from kernels.flash.library import Flash3Library
from kernels.interface import AttentionShape, Batch, KVLayer
from kernels.triton import reference
from kernels.triton.cache import FLOAT8
from tests.gpu.captures import NoWaiting
from tests.kernels.flash.fake_flash3 import FakeFlash3

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
HEADS = (4, 2, 64)
MIXED = ((299, 1), (0, 1), (700, 1), (0, 30), (256, 300), (9, 1))
CASES = [
    AttentionCase("hybrid", HEADS, 16, MIXED),
    AttentionCase("hybrid, odd pages", (9, 3, 40), 7, MIXED),
    AttentionCase("one kv head", (4, 1, 80), 256, MIXED),
    AttentionCase("no grouping, head of 256", (2, 2, 256), 16, ((33, 1), (60, 20))),
    AttentionCase("window", HEADS, 16, MIXED, window=100),
    AttentionCase("softcap", HEADS, 16, MIXED, softcap=15.0),
    AttentionCase("window, softcap", HEADS, 16, MIXED, window=100, softcap=15.0),
    AttentionCase("decodes", HEADS, 16, ((299, 1), (0, 1), (700, 1))),
    AttentionCase("decodes, window", HEADS, 16, ((299, 1), (0, 1), (700, 1)), window=50),
    AttentionCase("chunks", HEADS, 16, ((0, 30), (256, 300))),
    AttentionCase("captured decodes", HEADS, 16, ((5, 1), (90, 1), (31, 1)), pad=(1, 1)),
    AttentionCase("captured hybrid", HEADS, 16, MIXED, pad=(40, 3)),
    AttentionCase("captured, window", HEADS, 16, MIXED, window=100, pad=(40, 3)),
    AttentionCase("captured, chunks first", HEADS, 16, ((9, 30), (70, 1), (0, 3)), pad=(9, 5)),
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Capturable(FlashBackend):
    """Fails where its attention could not be captured."""

    def attention(
        self, q_TND: torch.Tensor, batch: Batch, layer: KVLayer, shape: AttentionShape
    ) -> torch.Tensor:
        with NoWaiting():
            return super().attention(q_TND, batch, layer, shape)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_any_batch_is_one_call(case: AttentionCase, dtype: torch.dtype) -> None:
    fake = FakeFlash3()
    result = checks.check_attention(case, Capturable(fake.library), dtype, DEVICE)
    assert result.passed, result
    assert len(fake.calls) == 1
    added = 0 if case.pad is None else case.pad[1]
    assert fake.lengths == [[length for _, length in case.slices] + [0] * added]


def test_batches_of_a_captured_size_differ_only_in_what_the_device_reads() -> None:
    """The host's arguments stay in a graph as they were when it was captured."""
    fake = FakeFlash3()
    attention = Flash3Attention(fake.library)
    case = CASES[0]
    backend = FlashBackend(fake.library)
    for slices in (MIXED, ((700, 1),), ((0, 200), (500, 300), (5, 1)), ((20, 1),) * 8):
        _, batch, layer = checks.attention_inputs(
            replace(case, slices=slices), backend, torch.float16, DEVICE
        )
        batch = of_size(batch, 640, 8, 1024)
        q_TND = torch.randn(640, 4, 64, dtype=torch.float16, device=DEVICE)
        with NoWaiting():
            out = attention(q_TND, batch, layer, case.shape)
        real = sum(length for _, length in slices)
        expected = reference.attention(q_TND, batch, layer, case.shape)
        assert reference.relative_error(out.flatten(1)[:real], expected[:real]) < 3e-3
    assert len({repr(call) for call in fake.calls}) == 1
    assert len({repr(call) for call in fake.schedules}) == 1
    assert len({repr(lengths) for lengths in fake.lengths}) == 4


def of_size(batch: Batch, num_tokens: int, num_slices: int, width: int) -> Batch:
    """As `padded`, with tables for `width` tokens of context in pages of 16."""
    batch = padded(batch, num_tokens, num_slices, width)
    tables = torch.zeros(num_slices, width // 16, dtype=torch.int32, device=DEVICE)
    tables[:, : batch.block_tables_SB.shape[1]] = batch.block_tables_SB
    return replace(batch, block_tables_SB=tables)


def test_layers_of_a_batch_share_a_schedule_for_each_shape() -> None:
    fake = FakeFlash3()
    backend = FlashBackend(fake.library)
    whole, windowed = CASES[0].shape, CASES[4].shape
    q_TND, batch, layer = checks.attention_inputs(CASES[0], backend, torch.float16, DEVICE)
    for shape in (whole, windowed, whole, windowed):
        backend.attention(q_TND, batch, layer, shape)
    assert (len(fake.calls), len(fake.schedules)) == (4, 2)
    # A capture runs its function twice, each time over a batch of its own.
    backend.attention(q_TND, replace(batch), layer, whole)
    assert len(fake.schedules) == 3


@pytest.mark.parametrize("kind", ["sinks", "alibi", "chunked"])
def test_what_it_lacks_goes_through_triton(kind: str) -> None:
    window = 100 if kind == "chunked" else None
    case, fake = AttentionCase(kind, HEADS, 16, MIXED, window, **{kind: True}), FakeFlash3()
    result = checks.check_attention(case, FlashBackend(fake.library), torch.float16, DEVICE)
    assert result.passed, result
    assert not fake.calls


def test_parts_fill_the_gpu_and_fit_in_memory() -> None:
    def parts(tokens: int, heads: tuple[int, int, int]) -> int:
        num_heads, num_kv_heads, head_dim = heads
        return most_splits(torch.empty(tokens, num_heads, head_dim, device="meta"), num_kv_heads)

    assert [parts(1, heads) for heads in ((32, 8, 128), (32, 32, 128), (8, 1, 128))] == [16, 4, 128]
    assert [parts(tokens, (32, 8, 128)) for tokens in (512, 2048, 8192, 16_384)] == [16, 4, 1, 1]
    assert parts(1, (256, 256, 64)) == 1


def test_graphs_hold_hybrid_batches_and_pages_have_any_size() -> None:
    backend = FlashBackend(FakeFlash3().library)
    support = backend.graph_support()
    assert support is not None
    assert support.hybrid
    assert backend.unsupported(torch.bfloat16, 1) is None
    assert backend.unsupported(torch.float32, 16) is not None
    assert backend.unsupported(torch.bfloat16, 16, 64) is None
    assert backend.unsupported(torch.bfloat16, 16, 100) is not None


@pytest.mark.parametrize(
    ("dtype", "head_dim", "message"),
    [
        (torch.float32, 64, "not float32"),
        (FLOAT8, 64, "not float8_e4m3fn"),
        (torch.float16, 100, "multiple of 8, not 100"),
        (torch.float16, 512, "at most 256"),
    ],
)
def test_a_cache_it_cannot_read_is_refused(dtype: torch.dtype, head_dim: int, message: str) -> None:
    backend = FlashBackend(FakeFlash3().library)
    shape = AttentionCase("", (2, 2, head_dim), 16, ()).shape
    with pytest.raises(ValueError, match=message):
        backend.allocate_kv(1, 2, 16, shape, dtype, DEVICE)


def test_the_fake_refuses_a_schedule_of_other_arguments() -> None:
    fake = FakeFlash3()

    def schedule(**call: Any) -> torch.Tensor:
        return fake.schedule(**{**call, "num_splits": 1})

    backend = FlashBackend(Flash3Library(fake.with_kvcache, schedule))
    with pytest.raises(RuntimeError, match="the schedule is of other arguments"):
        checks.check_attention(CASES[0], backend, torch.float16, DEVICE)
