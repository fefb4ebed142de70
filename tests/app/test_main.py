"""`parallel.device: auto` is decided once, for all replicas of a deployment."""

from __future__ import annotations

import pytest
import ray

from app.main import build_app
from app.settings import device as device_settings


@pytest.mark.parametrize(
    ("build", "num_gpus", "device"), [("13.0", 2, "cuda"), (None, 2, "cpu"), ("13.0", 0, "cpu")]
)
def test_the_device_is_what_ray_and_torch_have(
    monkeypatch: pytest.MonkeyPatch, build: str | None, num_gpus: int, device: str
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0, "GPU": float(num_gpus)})
    monkeypatch.setattr(device_settings, "cuda_of_torch", lambda: build)
    # The tests' own cluster, once it is up, claims GPUs that only those who ask may take.
    monkeypatch.setattr("app.main.takes_gpus", device_settings.takes_gpus)
    app = build_app({"model": {"path": "configs/models/demo"}})
    (args,) = app._bound_deployment.init_args
    assert args["parallel"]["device"] == device
    own = {"model": {"path": "configs/models/demo"}, "parallel": {"device": "cpu"}}
    assert build_app(own)._bound_deployment.init_args == (own,)
