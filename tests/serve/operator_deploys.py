"""`python -m tests.serve.operator_deploys`: the manifest's application, deployed as by KubeRay.

The operator sends `serveConfigV2` to the dashboard's REST API, as `serve deploy` does, polls the
application's state there, and may send the same again. One Ray node stands for all pods, so the
address is of the loopback, and the two fronts share its port.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from app.ray_environment import ENVIRONMENT

ROOT = str(Path(__file__).resolve().parents[2])
KEY = "a-key-of-more-than-a-few-letters"
os.environ.update(ENVIRONMENT | {"PYTHONPATH": ROOT, "LEGATO_API_KEY": KEY})

import httpx  # noqa: E402
import yaml  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402  it reads the environment when it is imported

from tests.ports import free_port  # noqa: E402

WITHIN_S = 240.0


def application(port: int) -> dict[str, Any]:
    """`serveConfigV2` of the manifest; only addresses, the model's folder and sizes differ."""
    manifest = Path(ROOT, "configs/deploy/rayservice.yaml").read_text("utf-8")
    config: dict[str, Any] = yaml.safe_load(
        next(yaml.safe_load_all(manifest))["spec"]["serveConfigV2"]
    )
    args = config["applications"][0]["args"]
    args["listen"] = f"127.0.0.1:{port}"
    args["model"]["path"] = f"{ROOT}/configs/models/demo"
    args["kv"] = {"memory_gib": 0.1}
    args["engine"] = {"standby": False}
    return config


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {WITHIN_S:g} s")
        time.sleep(0.5)  # polling, bounded


def trial(dashboard: str, port: int, file: Path) -> None:
    file.write_text(yaml.safe_dump(application(port)))
    command = str(Path(sys.executable).with_name("serve"))
    deploy = [command, "deploy", "--address", dashboard, str(file)]

    def state() -> dict[str, Any]:
        found = httpx.get(f"{dashboard}/api/serve/applications/", timeout=30.0).json()
        told: dict[str, Any] = found["applications"].get("legato", {})
        if told.get("status") in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise RuntimeError(json.dumps(told)[:3000])
        return told

    def replicas() -> dict[str, set[str]]:
        return {
            name: {r["replica_id"] for r in of["replicas"] if r["state"] == "RUNNING"}
            for name, of in state().get("deployments", {}).items()
        }

    subprocess.run(deploy, check=True, timeout=120)
    until(lambda: state().get("status") == "RUNNING")
    first = replicas()
    assert {name: len(of) for name, of in first.items()} == {"Front": 2, "Engine": 2}
    url = f"http://127.0.0.1:{port}"
    until(lambda: httpx.get(f"{url}/health", timeout=30.0).status_code == 200)
    body = {"model": "demo", "prompt": "Once", "max_tokens": 8, "temperature": 0}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=60.0).status_code == 401
    headers = {"authorization": f"Bearer {KEY}"}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60.0)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 8
    subprocess.run(deploy, check=True, timeout=120)  # the same once more replaces nothing
    until(lambda: state().get("status") == "RUNNING")
    assert replicas() == first


def main() -> None:
    head = {"num_cpus": 16, "resources": {"front": 2}, "include_dashboard": True}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        with TemporaryDirectory() as folder:
            dashboard = f"http://{cluster.head_node.webui_url}"
            trial(dashboard, free_port(), Path(folder, "serve.yaml"))
        print("the manifest's application came up")  # noqa: T201  what the test waits for
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
