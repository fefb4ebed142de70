"""Which backend computes: the one named, or the best that loads, and why another does not."""

from __future__ import annotations

import logging

import pytest
import torch

from kernels import registry
from kernels.registry import BackendError, resolve_backend
from kernels.torch.backend import TorchBackend


class AbsentBackend(TorchBackend):
    """Its library does not load."""

    def __init__(self) -> None:
        raise OSError("no such library")


def test_torch_is_always_there() -> None:
    assert type(resolve_backend("torch", "cpu", torch.float32)) is TorchBackend


def test_auto_takes_the_library_when_it_loads(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="kernels.registry"):
        backend = resolve_backend("auto", "cpu", torch.bfloat16)
    try:
        wanted = resolve_backend("cpu", "cpu", torch.bfloat16).name
    except BackendError:
        wanted = "torch"
    assert backend.name == wanted
    chosen = [r.getMessage() for r in caplog.records if "computes on cpu" in r.getMessage()]
    assert chosen == [f"backend {wanted} computes on cpu in torch.bfloat16"]


def test_auto_falls_back_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entry = registry.BackendEntry(f"{__name__}:AbsentBackend", ("cpu",))
    monkeypatch.setitem(registry.BACKENDS, "cpu", entry)
    with caplog.at_level(logging.INFO, logger="kernels.registry"):
        assert resolve_backend("auto", "cpu", torch.float32).name == "torch"
    assert "backend 'cpu' is not available: no such library" in caplog.text
    with pytest.raises(BackendError, match="no such library"):
        resolve_backend("cpu", "cpu", torch.float32)


def test_auto_takes_torch_on_a_gpu_too_old_for_the_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton", reason="the GPU backends need it")
    monkeypatch.setattr("kernels.triton.backend.target_arch", lambda: 75)
    with caplog.at_level(logging.INFO, logger="kernels.registry"):
        assert resolve_backend("auto", "cuda", torch.float16).name == "torch"
    problem = "'triton' is not available: it needs a GPU of compute capability 8.0, not 7.5"
    assert problem in caplog.text
    monkeypatch.setattr("kernels.triton.backend.target_arch", lambda: 80)
    assert resolve_backend("auto", "cuda", torch.float16).name == "triton"


def test_gpus_have_triton_first() -> None:
    assert next(name for name, entry in registry.BACKENDS.items() if "cuda" in entry.devices) == (
        "triton"
    )


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("quantum", "cpu", "'quantum' is unknown; known: auto, cpu, triton, flash_attn, torch"),
        ("triton", "cpu", "backend 'triton' runs on cuda, not on cpu"),
        ("cpu", "cuda", "backend 'cpu' runs on cpu, not on cuda"),
    ],
)
def test_what_cannot_run_is_named(
    name: str, device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # it would let GPU kernels run on CPU
    with pytest.raises(BackendError, match=message):
        resolve_backend(name, device, torch.float32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="flash-attn may be installed here")
def test_flash_attention_needs_its_package() -> None:
    with pytest.raises(BackendError, match="flash_attn package is not installed"):
        resolve_backend("flash_attn", "cuda", torch.float32)
