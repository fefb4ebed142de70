"""`python -m tests.serve.nodes_leave drained|killed`: a fleet loses a node while streams run.

Three raylets on this machine. The front is on the head; two engines, each on a node of its own.
No stream differs from one before; a node that is drained stays without replicas.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.ray_environment import ENVIRONMENT

ROOT = str(Path(__file__).resolve().parents[2])
os.environ.update(ENVIRONMENT | {"PYTHONPATH": ROOT})

import httpx  # noqa: E402
import ray  # noqa: E402  it reads the environment when it is imported
from ray import serve  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from ray.serve._private.api import serve_start  # noqa: E402
from ray.serve.schema import ServeDeploySchema  # noqa: E402
from ray.util.state import list_actors  # noqa: E402

from app.fleet.drain_node import drain  # noqa: E402
from tests.app.fleet.live.waiting import until  # noqa: E402
from tests.ports import free_port  # noqa: E402

MAX_TOKENS = 300
NUM_STREAMS = 8


def config(port: int) -> dict[str, Any]:
    engine = {"memory_gib": 0.1}
    args = {
        "listen": f"127.0.0.1:{port}",
        "fleet": {},
        "model": {"path": f"{ROOT}/configs/models/demo"},
        "kv": engine,
        "scheduling": {"max_requests": 16, "token_budget": 128},
    }
    front = {"num_cpus": 0.5, "resources": {"front": 1}}
    return {
        "proxy_location": "Disabled",
        "applications": [
            {
                "name": "legato",
                "route_prefix": "/",
                "import_path": "app.main:build_app",
                "args": args,
                "deployments": [
                    {"name": "Front", "ray_actor_options": front},
                    {"name": "Engine", "num_replicas": 2},
                ],
            }
        ],
    }


async def read(client: httpx.AsyncClient, number: int, begun: asyncio.Semaphore) -> str:
    body = {
        "model": "demo",
        "prompt": f"Tell me {number} things.",
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": number,
        "stream": True,
    }
    text, is_first = "", True
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                if is_first:
                    is_first = False
                    begun.release()
    return text


async def all_streams(url: str, begun: asyncio.Semaphore) -> list[str]:
    async with httpx.AsyncClient(base_url=url, timeout=300.0) as client:
        return await asyncio.gather(*[read(client, n, begun) for n in range(NUM_STREAMS)])


def engines_on(node_id: str) -> int:
    replicas = list_actors(filters=[("state", "=", "ALIVE"), ("node_id", "=", node_id)], limit=1000)
    return sum("Engine" in (actor.name or "") for actor in replicas)


def is_served(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5.0).status_code == 200
    except httpx.TransportError:
        return False


async def trial(url: str, nodes: list[str], lose: Callable[[str], bool]) -> None:
    await until(lambda: is_served(url) and sum(map(engines_on, nodes)) == 2, within_s=180.0)
    expected = await all_streams(url, asyncio.Semaphore(0))
    begun = asyncio.Semaphore(0)
    streams = asyncio.create_task(all_streams(url, begun))
    for _ in range(NUM_STREAMS):
        await begun.acquire()
    assert await asyncio.to_thread(lose, max(nodes, key=engines_on)), "replicas are left there"
    assert await streams == expected
    assert await all_streams(url, asyncio.Semaphore(0)) == expected


def main(how: str) -> None:
    head = {"num_cpus": 1, "resources": {"front": 1}, "include_dashboard": True}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = {node.node_id: node for node in [cluster.add_node(num_cpus=4) for _ in range(2)]}
    env = {"env_vars": {"PYTHONPATH": ROOT}}
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", runtime_env=env)

    def drained(node: str) -> bool:
        return drain(cluster.address, node, 120.0, lambda: engines_on(node))

    def killed(node: str) -> bool:
        cluster.remove_node(nodes[node], allow_graceful=False)
        return True

    try:
        port = free_port()
        client = serve_start(proxy_location="Disabled")
        client.deploy_apps(ServeDeploySchema.model_validate(config(port)), _blocking=False)
        lose = {"drained": drained, "killed": killed}[how]
        asyncio.run(trial(f"http://127.0.0.1:{port}", list(nodes), lose))
        print("nothing was lost")  # noqa: T201  what the test waits for
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
