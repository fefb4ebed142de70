"""`parallel.device: auto` is decided once, for all replicas of a deployment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import ray
from ray._private.accelerators import NvidiaGPUAcceleratorManager

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


@pytest.mark.parametrize(("visible", "device"), [(None, "cuda"), ("1", "cuda"), ("", "cpu")])
def test_before_ray_has_started_the_machine_tells(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, device: str
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(
        NvidiaGPUAcceleratorManager, "get_current_node_num_accelerators", staticmethod(lambda: 2)
    )
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("app.main.takes_gpus", device_settings.takes_gpus)
    monkeypatch.setattr(device_settings, "cuda_of_torch", lambda: "13.0")
    app = build_app({"model": {"path": "configs/models/demo"}})
    (args,) = app._bound_deployment.init_args
    assert args["parallel"]["device"] == device


WORKER_IN_A_CLUSTER_OF_ITS_OWN = """
import os
import app.main
import ray
from app.cli.local_ray import start_ray
start_ray(1)
print(ray.get(ray.remote(lambda: os.nice(0)).remote()) - os.nice(0))
"""


@pytest.mark.ray
def test_workers_are_not_nicer_than_the_process_that_starts_ray() -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", WORKER_IN_A_CLUSTER_OF_ITS_OWN]
    found = subprocess.run(command, env=own, capture_output=True, text=True, timeout=240)
    assert found.stdout.split() == ["0"], found.stderr[-3000:]
