"""`python -m tests.live.several_nodes MODEL`: stages that Ray holds to be on other machines.

Three raylets on this machine, each with a node id, workers and an object store of its own: what
Ray does between machines, it does between them. Only the network is not one.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from app.ray_environment import ENVIRONMENT

ROOT = str(Path(__file__).resolve().parents[2])
os.environ.update(ENVIRONMENT | {"PYTHONPATH": ROOT})

import ray  # noqa: E402  it reads the environment when it is imported
from ray.cluster_utils import Cluster  # noqa: E402
from ray.util.placement_group import placement_group  # noqa: E402

from tests.live.test_live_apart import opened  # noqa: E402


async def nodes_of(model: Path, stages: int) -> list[str]:
    bundles = [{"CPU": 0.5}] * (stages + 1)
    group = placement_group(bundles, strategy="STRICT_SPREAD")
    await group.ready()
    async with opened(model, stages, 1, group=group) as actors:
        return list(await asyncio.gather(*[actor.node_id.remote() for actor in actors]))


def main() -> None:
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    ray.init(
        address=cluster.address,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": {"PYTHONPATH": ROOT}},
    )
    try:
        nodes = asyncio.run(nodes_of(Path(sys.argv[1]), 2))
        assert len(set(nodes)) == 2, nodes
        print("exact")  # noqa: T201  what the test waits for
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
