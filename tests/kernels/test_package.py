"""The package is called `kernels`, and so is one that transformers looks for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.tensors
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
