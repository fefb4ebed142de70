"""Checks of the GPU bench: one that raises keeps no other from being run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("triton", reason="Triton is not installed: the GPU bench drives its kernels")

import torch

from app.bench.ceilings import Ceilings
from app.bench.gpu import kernels, sections
from app.bench.gpu.check_list import list_checks, parts_of, run_all
from app.bench.gpu.checks import CheckResult
from app.bench.report import MeasurementError
from kernels.triton import dense
from kernels.triton.backend import TritonBackend

GOOD, OTHER = (CheckResult(name, "float32", 1e-7, 1e-5) for name in ("good", "other"))


def out_of_resources() -> CheckResult:
    raise RuntimeError("out of resource: shared memory")


def test_a_check_that_raises_stops_no_other() -> None:
    found: list[CheckResult] = []
    listed = [
        ("a", out_of_resources),
        ("b", lambda: GOOD),
        ("c", out_of_resources),
        ("d", lambda: iter((GOOD, OTHER))),
    ]
    with pytest.raises(MeasurementError, match=r"a \(of 2\): RuntimeError: out of resource"):
        run_all(found.append, listed)
    assert found == [GOOD, GOOD, OTHER]


def test_none_is_run_on_a_gpu_that_no_longer_answers() -> None:
    found: list[CheckResult] = []
    listed = [("a", lambda: GOOD), ("b", out_of_resources), ("c", lambda: GOOD)]
    with pytest.raises(MeasurementError, match=r"b \(of 1\): .*; not run: c \(of 1\)"):
        run_all(found.append, listed, is_sound=lambda: False)
    assert found == [GOOD]


def test_every_kind_of_kernel_is_checked() -> None:
    assert parts_of("flash_attn") == ("attention",)
    backend, device = TritonBackend(), torch.device("cpu")
    listed = {part: list(list_checks(part, backend, device)) for part in parts_of("triton")}
    assert all(listed.values())
    titles = [title for part in listed.values() for title, _ in part]
    kinds = {title.partition(",")[0] for title in titles}
    assert kinds == {
        "attention", "rope", "elementwise", "experts", "adapters", "recurrence",
        "sums of ranks", "linear",
    }  # fmt: skip
    assert sum("one launch" in title for title in titles) > 0
    assert sum("fp8_w8a8" in title for title in titles) > 0


@pytest.mark.parametrize("breaks", ["time_attention", "time_others"])
def test_kernels_that_cannot_be_timed_stop_no_others(
    monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    parts = ("time_attention", "time_others", "time_experts")
    for part in parts:
        monkeypatch.setattr(kernels, part, rows_of(part, part == breaks))
    monkeypatch.setattr(sections, "resolve", lambda name: None)
    found: list[str] = []
    with pytest.raises(MeasurementError, match="out of resource"):
        sections.run_kernels(
            lambda section, row: found.append(row),
            "triton",
            Ceilings(1.0, 1.0),
            torch.device("cpu"),
        )
    assert found == list(parts)


@pytest.mark.parametrize(("arch", "has_own"), [(90, True), (100, True), (89, False), (120, False)])
def test_the_kernel_of_few_tokens_is_timed_on_gpus_that_have_it(
    monkeypatch: pytest.MonkeyPatch, arch: int, has_own: bool
) -> None:
    """99 KiB of shared memory are too little for it, and what raises ends the rows of all."""
    monkeypatch.setattr(dense, "target_arch", lambda: arch)
    monkeypatch.setattr(kernels, "_dense_time", lambda own, layer, tokens, *rest: (own, tokens))
    rows = [*kernels.time_dense(Ceilings(1.0, 1.0), torch.device("cpu"))]
    assert (False, 2048) in rows
    assert {tokens for own, tokens in rows if own} == ({1, 8, 16, 32} if has_own else set())


def rows_of(part: str, breaks: bool) -> Callable[..., Iterator[str]]:
    """What yields a row, and then raises or ends."""

    def rows(*arguments: object) -> Iterator[str]:
        yield part
        if breaks:
            out_of_resources()

    return rows
