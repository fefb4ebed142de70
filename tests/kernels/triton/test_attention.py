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
    shapes: list[AttentionShape] = []
    noting = attention.hybrid_attention

    def keep(*arguments: Any) -> None:
        shapes.append(arguments[4])
        noting(*arguments)

    monkeypatch.setattr(attention, "hybrid_attention", keep)

    def time_s(works: Sequence[Callable[[], object]]) -> float:
        assert len(works) == 2, "one layer alone could stay in the GPU's cache"
        launched.clear()
        works[-1]()
        timed.append(launched[:2])
        return 1.0

    # ALiBi covers a model's positions, which may be fewer than those of the batch.
    sinks_N, alibi_NP = torch.zeros(2), torch.zeros(2, 1)
    shape = replace(SHAPE, sliding_window=9, softcap=5.0, sinks_N=sinks_N, alibi_NP=alibi_NP)
    timed: list[list[str]] = []
    one_launch_is_faster(shape, kv_dtype, 16, DEVICE, time_s)
    assert timed == [["decode_attention", "prefill_attention"], ["hybrid_attention"]]
    for seen in shapes:
        assert (seen, seen.sinks_N) == (shape, sinks_N)
        assert seen.alibi_NP is not None
        assert seen.alibi_NP.shape == (2, 41)


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


def test_a_measurement_without_the_memory_for_it_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The weights may leave less than its layers take."""

    def refuse(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(attention, "allocate", refuse)
    assert not one_launch_is_faster(SHAPE, torch.float16, 16, DEVICE, lambda works: 1.0)
    assert "is not used: CUDA out of memory" in caplog.text


def test_a_gpu_that_computes_no_more_ends_the_start_with_what_ruined_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After an illegal access every later call fails, and none of them says why."""
    monkeypatch.setattr(attention, "Attention", lambda: failing)
    ruined = torch.device("meta")  # of which no number comes back
    with pytest.raises(RuntimeError, match="out of resource"):
        one_launch_is_faster(SHAPE, torch.float16, 16, ruined, lambda works: 1.0)


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"sliding_window": 9},
        {"softcap": 5.0},
        {"sinks_N": torch.ones(2)},
        {"alibi_NP": torch.ones(2, 50)},
    ],
    ids=str,
)
def test_every_kind_of_layer_compares_its_own_bits(variant: dict[str, Any]) -> None:
    timed: list[float] = []
    shape = replace(
        SHAPE, **{k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in variant.items()}
    )

    def time_s(works: Sequence[Callable[[], object]]) -> float:
        timed.append(2.0 - len(timed))
        return timed[-1]

    assert one_launch_is_faster(shape, torch.float16, 16, DEVICE, time_s)


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


def test_a_backend_measures_each_kind_of_layer_once_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    windowed, with_sinks = replace(SHAPE, sliding_window=9), replace(SHAPE, sinks_N=torch.ones(2))
    measured: list[AttentionShape] = []

    def measure(shape: AttentionShape, *rest: Any) -> bool:
        measured.append(shape)
        return shape.sliding_window is None

    def ways(made: TritonBackend) -> list[bool]:
        chosen: list[bool] = []
        layer = PagedKV(torch.zeros(1, 16, 1, 32), torch.zeros(1, 16, 1, 32))
        batch, _ = typical_batch(3, 40, 20, 16, DEVICE)
        monkeypatch.setattr(made, "_attention", lambda *arguments: chosen.append(arguments[-1]))
        for shape in (SHAPE, windowed, with_sinks):
            made.attention(torch.zeros(23, 2, 32), batch, layer, shape)
        return chosen

    monkeypatch.setattr(backend, "one_launch_is_faster", measure)
    layers = [SHAPE, windowed, replace(with_sinks, sinks_N=torch.zeros(2)), with_sinks, SHAPE]
    made = TritonBackend()
    for device, times, chosen in (
        ("cpu", 0, [False] * 3), ("cuda", 3, [True, False, True]), ("cuda", 3, [True, False, True])
    ):  # fmt: skip
        made.measure_attention(layers, torch.float16, 16, torch.device(device))
        assert (len(measured), ways(made)) == (times, chosen)
    given = TritonBackend(one_launch=True)
    given.measure_attention(layers, torch.float16, 16, torch.device("cuda"))
    assert (len(measured), ways(given)) == (3, [True] * 3)
