"""`parallel.device: auto`: CUDA where there are GPUs that torch can use."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path


def takes_gpus(device: str, num_gpus: float) -> bool:
    """Whether engines of this `parallel.device` take GPUs, of which Ray has so many."""
    if device == "auto":
        return num_gpus > 0 and cuda_of_torch() is not None
    return device == "cuda"


def cuda_of_torch() -> str | None:
    """torch.version.cuda, read from its file, because importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    found = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    cuda: str | None = found["cuda"]
    return cuda
