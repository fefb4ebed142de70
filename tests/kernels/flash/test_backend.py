"""How we call flash-attn, against a fake that enforces its documented constraints."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip(
    "triton", reason="Triton is not installed: flash-attn's partner kernels need it"
)

from app.bench.gpu import checks
from app.bench.gpu.checks import AttentionCase
from app.bench.gpu.geometry import hybrid_batch
from kernels.flash import backend as flash_backend
from kernels.flash.backend import FlashBackend
from kernels.flash.hybrid import SeqLens, measure_crossover
from kernels.flash.library import FlashLibrary
from kernels.triton.cache import FLOAT8, allocate, block_bytes
from tests.kernels.flash.fake_flash_attn import FakeFlash

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
HEADS = (4, 2, 64)
MIXED = ((299, 1), (0, 1), (700, 1), (0, 30), (256, 300), (9, 1))
CASES = [
    AttentionCase("hybrid", HEADS, 256, MIXED),
    AttentionCase("window", HEADS, 256, MIXED, window=100),
    AttentionCase("softcap", HEADS, 512, MIXED, softcap=15.0),
    AttentionCase("decodes", HEADS, 256, ((299, 1), (0, 1), (700, 1))),
    AttentionCase("chunks", HEADS, 256, ((0, 30), (256, 300))),
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("one_call_up_to", [0, 10_000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_attention(case: AttentionCase, dtype: torch.dtype, one_call_up_to: int) -> None:
    backend = FlashBackend(FakeFlash().library, one_call_up_to)
    result = checks.check_attention(case, backend, dtype, DEVICE)
    assert result.passed, result


def calls_of(case: AttentionCase, one_call_up_to: int) -> list[tuple[str, int, int]]:
    fake = FakeFlash()
    checks.check_attention(case, FlashBackend(fake.library, one_call_up_to), torch.float16, DEVICE)
    return fake.calls


def test_a_hybrid_batch_is_one_call_while_contexts_are_short() -> None:
    hybrid = CASES[0]
    assert calls_of(hybrid, 10_000) == [("varlen", 6, 300)]
    assert calls_of(hybrid, 700) == [("with_kvcache", 3, 1), ("varlen", 3, 300)]


def test_batches_of_one_kind_are_one_call_whatever_the_crossover() -> None:
    assert calls_of(CASES[3], 0) == calls_of(CASES[3], 10_000) == [("with_kvcache", 3, 1)]
    assert calls_of(CASES[4], 0) == calls_of(CASES[4], 10_000) == [("varlen", 2, 300)]


def test_captured_decodes_take_padding_slices() -> None:
    case = AttentionCase("captured", HEADS, 256, ((299, 1), (700, 1)), pad=(2, 2))
    result = checks.check_attention(
        case, FlashBackend(FakeFlash().library, 0), torch.float16, DEVICE
    )
    assert result.passed, result


@pytest.mark.parametrize(("programs", "calls"), [(8, [("with_kvcache", 4, 1)]), (9, [])])
def test_captured_decodes_that_do_not_fill_the_gpu_go_through_triton(
    monkeypatch: pytest.MonkeyPatch, programs: int, calls: list[tuple[str, int, int]]
) -> None:
    """flash-attn would split them by the width of their tables, not by their lengths."""
    monkeypatch.setattr(flash_backend, "num_programs", lambda: programs)
    case = AttentionCase("captured", HEADS, 256, ((299, 1), (700, 1)), pad=(2, 2))
    assert calls_of(case, 0) == calls


@pytest.mark.parametrize("kind", ["sinks", "alibi", "chunked"])
def test_what_flash_attn_lacks_goes_through_triton(kind: str) -> None:
    window = 100 if kind == "chunked" else None
    case, fake = AttentionCase(kind, HEADS, 256, MIXED, window, **{kind: True}), FakeFlash()
    result = checks.check_attention(case, FlashBackend(fake.library, 0), torch.float16, DEVICE)
    assert result.passed, result
    assert not fake.calls


def test_kv_lengths_are_the_context_behind_each_slices_last_token() -> None:
    batch, _ = hybrid_batch([299, 0, 256], [1, 30, 300], 256, "cpu")
    lengths = SeqLens.of(batch)
    assert lengths.seqlens_k.tolist() == [300, 30, 556]
    assert lengths.cu_seqlens_k.tolist() == [0, 300, 330, 886]
    assert lengths.cu_seqlens_k.dtype == torch.int32


def test_offsets_of_chunks_are_computed_once_for_all_layers() -> None:
    """Beside its two calls, a layer of a hybrid batch launches what joins their results."""
    fake = FakeFlash()
    backend = FlashBackend(fake.library, 0)
    q_TND, batch, cache = checks.attention_inputs(CASES[0], backend, torch.float16, DEVICE)
    backend.attention(q_TND, batch, cache, CASES[0].shape)
    nothing = FlashLibrary(lambda q, *arguments, **options: q, lambda q, *arguments, **options: q)
    backend._flash = nothing
    with Launches() as launches:
        backend.attention(q_TND, batch, cache, CASES[0].shape)
    assert launches.names == ["cat"]


@pytest.mark.parametrize(("window", "passed"), [(600, (599, 0)), (701, (-1, -1))])
def test_a_window_that_holds_every_context_is_none(window: int, passed: tuple[int, int]) -> None:
    """With a window, flash-attn does not share a read of K and V among the heads of a group."""
    seen: list[tuple[int, int]] = []
    fake = FakeFlash()

    def noted(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*arguments: torch.Tensor, **options: Any) -> torch.Tensor:
            seen.append(options["window_size"])
            return function(*arguments, **options)

        return call

    library = FlashLibrary(noted(fake.varlen), noted(fake.with_kvcache))
    case = AttentionCase("window", HEADS, 256, MIXED, window=window)
    result = checks.check_attention(case, FlashBackend(library, 0), torch.float16, DEVICE)
    assert result.passed, result
    assert set(seen) == {passed}


class Launches(TorchDispatchMode):
    """Names of the torch operations that would launch something."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not function.is_view:
            self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("block_size", "dtype", "head_dim", "message"),
    [
        (16, torch.float16, 64, "multiple of 256, not 16"),
        (256, torch.float32, 64, "not float32"),
        (256, FLOAT8, 64, "not float8_e4m3fn"),
        (256, torch.float16, 100, "multiple of 8, not 100"),
        (256, torch.float16, 512, "at most 256"),
    ],
)
def test_a_cache_flash_attn_cannot_read_is_refused(
    block_size: int, dtype: torch.dtype, head_dim: int, message: str
) -> None:
    backend = FlashBackend(FakeFlash().library, 0)
    shape = AttentionCase("", (2, 2, head_dim), block_size, ()).shape
    with pytest.raises(ValueError, match=message):
        backend.allocate_kv(1, 2, block_size, shape, dtype, DEVICE)


def test_the_fake_refuses_what_the_library_would() -> None:
    shape = CASES[0].shape
    [layer] = allocate(1, 4, 16, shape, torch.float16, torch.device("cpu"))
    batch, _ = hybrid_batch([0], [4], 16, "cpu")
    q = torch.zeros(4, 4, 64, dtype=torch.float16)
    backend = FlashBackend(FakeFlash().library, 0)
    with pytest.raises(RuntimeError, match="divisible by 256"):
        backend.attention(q, batch, layer, shape)


@pytest.mark.parametrize(
    ("times", "crossover"),
    [
        ([1, 2, 1, 2, 3, 2], 512),  # one call wins at 256 and 512, loses at 1024
        ([3, 2], 0),
        ([1, 2] * 6, 8192),
    ],
)
def test_the_crossover_is_where_one_call_stops_winning(times: list[float], crossover: int) -> None:
    clock = itertools.chain(times)

    def time_s(works: Sequence[Callable[[], object]]) -> float:
        return next(clock)

    fake = FakeFlash()
    shape = AttentionCase("", (2, 1, 32), 256, ()).shape
    measured = measure_crossover(fake.library, shape, torch.float16, torch.device("cpu"), time_s)
    assert measured == crossover


def test_what_is_measured_are_the_two_forms() -> None:
    def time_s(works: Sequence[Callable[[], object]]) -> float:
        assert len(works) > 1, "one layer alone would stay in the GPU's cache"
        works[-1]()
        return float(len(fake.calls))

    fake = FakeFlash()
    shape = AttentionCase("", (2, 1, 32), 256, ()).shape
    measure_crossover(fake.library, shape, torch.float16, torch.device("cpu"), time_s)
    assert fake.calls[:3] == [("varlen", 33, 512), ("with_kvcache", 32, 1), ("varlen", 1, 512)]


def test_a_measurement_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """At long contexts fewer layers in turn, then fewer decodes."""
    shape = AttentionCase("", (2, 1, 32), 256, ()).shape
    one_page = block_bytes(256, shape, torch.float16)
    most = 200 * one_page
    monkeypatch.setattr("kernels.typical_batch.MOST_BYTES", most)
    seen: list[tuple[int, int]] = []

    def time_s(works: Sequence[Callable[[], object]]) -> float:
        layers = [work.args[4] for work in works]  # type: ignore[attr-defined]
        chunk_bytes = len(layers) * 2 * one_page
        assert sum(x.keys.nbytes + x.values.nbytes for x in layers) <= most + chunk_bytes
        seen.append((len(layers), works[0].args[2].num_decodes))  # type: ignore[attr-defined]
        return 1.0

    measure_crossover(FakeFlash().library, shape, torch.float16, torch.device("cpu"), time_s)
    assert seen[::2] == seen[1::2] == [(3, 32), (2, 32), (1, 32), (1, 22), (1, 11), (1, 6)]
