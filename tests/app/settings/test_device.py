"""Which devices take GPUs, and what torch is built for."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from app.settings import device
from app.settings.device import takes_gpus


@pytest.mark.parametrize(
    ("asked", "num_gpus", "build", "takes"),
    [
        ("auto", 2.0, "13.0", True),
        ("auto", 2.0, None, False),
        ("auto", 0.0, "13.0", False),
        ("cuda", 0.0, None, True),  # and is refused elsewhere
        ("cpu", 2.0, "13.0", False),
    ],
)
def test_auto_takes_gpus_that_torch_can_use(
    monkeypatch: pytest.MonkeyPatch, asked: str, num_gpus: float, build: str | None, takes: bool
) -> None:
    monkeypatch.setattr(device, "cuda_of_torch", lambda: build)
    assert takes_gpus(asked, num_gpus) is takes


def test_what_torch_is_built_for_is_known_without_its_import() -> None:
    assert device.cuda_of_torch() == torch.version.cuda
    code = (
        "import sys; from app.settings.device import cuda_of_torch\n"
        "cuda_of_torch(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
