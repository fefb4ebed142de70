"""What the stage takes from the machine: backends, memory, and a package called `kernels`."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from actors.stage.memory import available_bytes, cgroup_headroom_bytes
from kernels import registry
from kernels.registry import BackendError, resolve_backend
from kernels.torch_native import TorchBackend
from tests.actors.stage.greedy_reference import skip_unless_available
from tests.actors.stage.mini_planner import make_runner

ROOT = Path(__file__).resolve().parents[3]


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


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("quantum", "cpu", "'quantum' is unknown; known: auto, cpu, flash_attn, triton, torch"),
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


def test_memory_within_a_container(tmp_path: Path) -> None:
    assert cgroup_headroom_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    assert cgroup_headroom_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 150\n")
    assert cgroup_headroom_bytes(tmp_path) == 450


def test_memory_within_an_old_container(tmp_path: Path) -> None:
    root = tmp_path / "memory"
    root.mkdir()
    (root / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert cgroup_headroom_bytes(tmp_path) is None
    (root / "memory.limit_in_bytes").write_text("1000\n")
    (root / "memory.usage_in_bytes").write_text("1200\n")
    (root / "memory.stat").write_text("total_inactive_file 100\n")
    assert cgroup_headroom_bytes(tmp_path) == 0


def test_memory_of_this_machine() -> None:
    import psutil

    assert 0 < available_bytes(torch.device("cpu")) <= psutil.virtual_memory().total


def test_transformers_beside_our_kernels_package(tiny_model: Callable[..., Path]) -> None:
    """transformers probes for a hub package called `kernels`: the one here must not confuse it."""
    script = (
        "import kernels, transformers; from pathlib import Path\n"
        f"assert Path(kernels.__file__).parent == Path({str(ROOT)!r}) / 'kernels'\n"
        f"model = transformers.AutoModelForCausalLM.from_pretrained({str(tiny_model('llama'))!r})\n"
        "import torch; print(model(torch.tensor([[1, 2, 3]])).logits.shape)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "torch.Size([1, 3, 263])" in done.stdout


@pytest.mark.parametrize(("backend", "left"), [("cpu", 1), ("torch", 2)])
def test_a_backend_with_threads_of_its_own_has_no_others_beside_it(
    tiny_model: Callable[..., Path], backend: str, left: int
) -> None:
    """Once loaded: torch's threads spin after every operation that it spreads over them."""
    skip_unless_available(backend)
    before = torch.get_num_threads()
    try:
        make_runner(tiny_model("llama"), backend=backend, num_threads=2)
        assert torch.get_num_threads() == left
    finally:
        torch.set_num_threads(before)
