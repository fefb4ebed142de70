"""`python -m tests.serve.nodes_split`: prompts on one node, streams on another; KV goes by TCP.

Three raylets on this machine. The front is on the head, the engine for prompts and the one for
streams each on a node of its own, which has room for one. Streams are those of one engine that does
both, and the KV of their prompts is fetched.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import uuid
from typing import Any

from app.ray_environment import ENVIRONMENT
from tests.serve.nodes_leave import ROOT, all_streams, is_served

os.environ.update(ENVIRONMENT | {"PYTHONPATH": ROOT})

import httpx
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve._private.api import serve_start
from ray.serve.schema import ServeDeploySchema

from tests.app.fleet.live.waiting import until
from tests.ports import free_port

# So slow a model that fetching always beats computing: what is asked is not how fast either is.
SLOW = "{name: slow, tokens_s: [[1, 1.0], [64, 64.0]]}"


def config(port: int, folder: str, way: str) -> dict[str, Any]:
    with open(f"{folder}/slow.yaml", "w") as file:
        file.write(SLOW)
    args = {
        "listen": f"127.0.0.1:{port}",
        "fleet": {"way": way},
        "model": {"path": f"{ROOT}/configs/models/demo"},
        "kv": {"memory_gib": 0.1, "block_size": 4, "shared_cache_gib": 0.1},
        "scheduling": {
            "max_requests": 16,
            "token_budget": 128,
            "cost_model": f"{folder}/slow.yaml",
        },
    }
    args["kv"]["shared_cache_path"] = folder
    front = {"num_cpus": 0, "resources": {"front": 1}}
    deployments = [{"name": "Front", "ray_actor_options": front}]
    application = {"name": "legato", "route_prefix": "/", "import_path": "app.main:build_app"}
    return {
        "proxy_location": "Disabled",
        "applications": [{**application, "args": args, "deployments": deployments}],
    }


def status(url: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{url}/console/status", timeout=10.0).json()
    return found


def serving(url: str) -> list[dict[str, Any]]:
    return [engine for engine in status(url)["engines"] if engine["state"] == "serving"]


def is_fetched(url: str) -> bool:
    """Whether the blocks of a new prompt were."""
    before = status(url)["num_fetched_blocks"]
    body = {"prompt": f"{uuid.uuid4()}: tell me more.", "max_tokens": 8, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json={"model": "demo", **body}, timeout=60.0)
    assert answer.status_code == 200, answer.text
    return bool(status(url)["num_fetched_blocks"] > before)


async def streams_under(client: Any, folder: str, way: str, num_engines: int) -> list[str]:
    """What the clients get under this way, and that it was divided."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    schema = ServeDeploySchema.model_validate(config(port, folder, way))
    client.deploy_apps(schema, _blocking=False)
    await until(
        lambda: is_served(url) and len(serving(url)) == num_engines,
        within_s=180.0,
    )
    if way == "split":
        assert len({engine["node"] for engine in serving(url)}) == 2
        await until(lambda: is_fetched(url), within_s=60.0)  # once the ranks know each other
    texts = await all_streams(url, asyncio.Semaphore(0))
    assert status(url)["fleet"]["num_hand_overs"] >= (len(texts) if way == "split" else 0)
    return texts


def main() -> None:
    head = {"num_cpus": 0, "resources": {"front": 2}, "include_dashboard": True}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    env = {"env_vars": {"PYTHONPATH": ROOT}}
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", runtime_env=env)
    try:
        # Engines write to their caches in it until they are shut down below.
        with tempfile.TemporaryDirectory(
            prefix="legato-split-", ignore_cleanup_errors=True
        ) as folder:
            client = serve_start(proxy_location="Disabled")
            together = asyncio.run(streams_under(client, folder, "colocated", 1))
            divided = asyncio.run(streams_under(client, folder, "split", 2))
            assert divided == together
        print("nothing was lost")  # noqa: T201  what the test waits for
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
