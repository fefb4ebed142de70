"""Which way a hybrid batch takes: one launch or two, by measurement before serving."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be tested")

from kernels.interface import AttentionShape
from kernels.triton import attention, backend
from kernels.triton.attention import Attention, one_launch_is_faster
from kernels.triton.backend import TritonBackend
from kernels.triton.cache import FLOAT8, PagedKV
from kernels.typical_batch import typical_batch

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
SHAPE = AttentionShape(2, 1, 32, 0.2)
LAUNCHES = ("hybrid_attention", "decode_attention", "prefill_attention")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_CHUNK", 20), ("_DECODES", 3), ("_CONTEXT", 40), ("_MOST_LAYERS", 2)):
        monkeypatch.setattr(attention, name, value)


def note_launches(monkeypatch: pytest.MonkeyPatch, alike: bool = False) -> list[str]:
    """Each fills its output with a number of its own, its place below; alike: all with one."""
    launched: list[str] = []
    for i, name in enumerate(LAUNCHES):

        def note(*arguments: Any, i: int = i, name: str = name) -> None:
            launched.append(name)
            arguments[1].fill_(0 if alike else i)

        monkeypatch.setattr(attention, name, note)
    return launched


@pytest.mark.parametrize(("two_s", "one_s"), [(2.0, 1.0), (1.0, 2.0), (1.0, 1.0)])
def test_the_faster_way_is_kept(two_s: float, one_s: float) -> None:
    times = iter((two_s, one_s))
    faster = one_launch_is_faster(SHAPE, torch.float16, 16, DEVICE, lambda works: next(times))
    assert faster is (one_s < two_s)


@pytest.mark.parametrize("kv_dtype", [torch.float16, FLOAT8])
def test_what_is_timed_are_the_two_ways(
    monkeypatch: pytest.MonkeyPatch, kv_dtype: torch.dtype
) -> None:
    launched = note_launches(monkeypatch, alike=True)

    def time_s(works: Sequence[Callable[[], object]]) -> float:
        assert len(works) == 2, "one layer alone could stay in the GPU's cache"
        launched.clear()
        works[-1]()
        timed.append(launched[:2])
        return 1.0

    # Sinks and ALiBi cover a model's heads and positions, not those of the batch.
    shape = replace(SHAPE, sinks_N=torch.zeros(2), alibi_NP=torch.zeros(2, 1))
    timed: list[list[str]] = []
    one_launch_is_faster(shape, kv_dtype, 16, DEVICE, time_s)
    assert timed == [["decode_attention", "prefill_attention"], ["hybrid_attention"]]


def wrong(*arguments: Any) -> None:
    arguments[1].fill_(1e3)


def failing(*arguments: Any) -> None:
    raise RuntimeError("out of resource: shared memory")


@pytest.mark.parametrize(
    ("launch", "message"), [(wrong, "differs from that in two"), (failing, "out of resource")]
)
def test_one_launch_that_is_wrong_or_fails_here_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    launch: Callable[..., None],
    message: str,
) -> None:
    monkeypatch.setattr(attention, "hybrid_attention", launch)
    times = iter((2.0, 1.0))
    assert not one_launch_is_faster(SHAPE, torch.float16, 16, DEVICE, lambda works: next(times))
    assert message in caplog.text


def test_what_one_launch_leaves_out_is_compiled_beside_the_first_of_a_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched = note_launches(monkeypatch)
    batch, _ = typical_batch(3, 40, 20, 16, DEVICE)
    layer = PagedKV(torch.zeros(1, 16, 1, 32), torch.zeros(1, 16, 1, 32))
    q_TND = torch.zeros(23, 2, 32, dtype=torch.float16, device=DEVICE)
    attend = Attention()
    windowed = replace(SHAPE, sliding_window=9)
    for shape in (SHAPE, SHAPE, windowed, SHAPE, windowed):
        out = attend(q_TND, batch, layer, shape, one_launch=True)
        assert (out == LAUNCHES.index("hybrid_attention")).all()  # and is not written again
    first = list(LAUNCHES)
    assert launched == [*first, first[0], *first, first[0], first[0]]


def test_contexts_take_no_more_memory_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    one_context = 3 * 16 * 2 * 32 * 2  # blocks, tokens, K and V, numbers, bytes
    monkeypatch.setattr("kernels.typical_batch.MOST_BYTES", 2 * one_context)
    seen: list[int] = []
    allocate = attention.allocate

    def watched(num_layers: int, num_blocks: int, *rest: Any) -> Any:
        seen.extend((num_layers, num_blocks))
        return allocate(num_layers, num_blocks, *rest)

    monkeypatch.setattr(attention, "allocate", watched)
    one_launch_is_faster(SHAPE, torch.float16, 16, DEVICE, lambda works: 1.0)
    assert seen == [1, 2 * 3 + 2]  # and the chunk's


def test_a_shape_without_the_choice_is_not_timed() -> None:
    def time_s(works: Sequence[Callable[[], object]]) -> float:
        raise AssertionError("timed")

    shape = replace(SHAPE, head_dim=64)  # in float32 of eight warps on Hopper
    assert not one_launch_is_faster(shape, torch.float32, 16, DEVICE, time_s)


@pytest.mark.parametrize("faster", [True, False])
def test_a_backend_measures_once_when_a_gpu_holds_its_cache(
    monkeypatch: pytest.MonkeyPatch, faster: bool
) -> None:
    measured: list[AttentionShape] = []

    def measure(shape: AttentionShape, *rest: Any) -> bool:
        measured.append(shape)
        return faster

    monkeypatch.setattr(backend, "one_launch_is_faster", measure)
    monkeypatch.setattr(backend.cache, "allocate", lambda *arguments: [])
    for module in (backend.logits, backend.blocks):
        monkeypatch.setattr(module, "warm", lambda *arguments: None)
    made = TritonBackend()
    for device, times, chosen in (("cpu", 0, None), ("cuda", 1, faster), ("cuda", 1, faster)):
        made.allocate_kv(1, 1, 16, SHAPE, torch.float16, torch.device(device))
        assert (len(measured), made.one_launch) == (times, chosen)
    given = TritonBackend(not faster)
    given.allocate_kv(1, 1, 16, SHAPE, torch.float16, torch.device("cuda"))
    assert (len(measured), given.one_launch) == (1, not faster)
