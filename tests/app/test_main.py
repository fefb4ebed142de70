"""`parallel.device: auto` is decided once, for all replicas of a deployment."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import ray
from ray._private.accelerators import NvidiaGPUAcceleratorManager
from ray.serve._private.http_util import ASGIAppReplicaWrapper

from app.main import build, build_app
from app.settings import device as device_settings
from app.settings.model_folder import SettingsError


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


def test_what_the_yaml_says_beside_args_python_says_too() -> None:
    demo = {"model": {"path": "configs/models/demo"}, "parallel": {"device": "cpu"}}
    alone = build(demo, deployments={"LLMServer": {"num_replicas": 3}})
    assert alone._bound_deployment.num_replicas == 3
    assert alone._bound_deployment.ray_actor_options == (
        build_app(demo)._bound_deployment.ray_actor_options
    )
    scaling = {"min_replicas": 1, "max_replicas": 4}
    chosen = {"Engine": {"autoscaling_config": scaling}, "Front": {"num_replicas": 2}}
    front = build({**demo, "fleet": {}}, deployments=chosen)._bound_deployment
    (engine,) = [a._bound_deployment for a in front.init_args if hasattr(a, "_bound_deployment")]
    assert front.num_replicas == 2
    assert engine._deployment_config.autoscaling_config.max_replicas == 4
    with pytest.raises(SettingsError, match=r"deployments\.Engine: none of LLMServer"):
        build(demo, deployments={"Engine": {"num_replicas": 2}})


@pytest.mark.parametrize("fleet", [{}, {"fleet": {}}])
def test_without_http_it_is_no_ingress(fleet: dict[str, Any]) -> None:
    """Serve refuses a second one in an application."""
    demo = {"model": {"path": "configs/models/demo"}, "parallel": {"device": "cpu"}, **fleet}
    for http in (True, False):
        found = build(demo, http=http)._bound_deployment
        assert issubclass(found.func_or_class, ASGIAppReplicaWrapper) == http
        assert found.name == build_app(demo)._bound_deployment.name
        assert found.max_ongoing_requests == build_app(demo)._bound_deployment.max_ongoing_requests


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
