"""`python -m app.fleet.drain_node SECONDS`: what a node does before it goes.

Serve drains this Ray node: it starts each replica anew elsewhere, then stops the one
here, and an engine that is stopped hands its streams over. Returns when no replica is left here, or
after so many seconds. Kubernetes runs it in each pod before that is deleted (configs/deploy).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import ray

_POLL_S = 1.0


def drain(address: str, node_id: str, within_s: float, num_left: Callable[[], int]) -> bool:
    """Ask for it and wait; False when replicas are left after so many seconds.

    address: of the cluster's GCS. num_left: replicas that are still on the node. Raises
    CalledProcessError where Ray refuses.
    """
    subprocess.run(
        [
            *(shutil.which("ray") or "ray", "drain-node", "--address", address),
            *("--node-id", node_id),
            *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the node goes"),
            *("--deadline-remaining-seconds", f"{within_s:.0f}"),
        ],
        check=True,
    )
    deadline_s = time.monotonic() + within_s
    while num_left():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def num_replicas() -> int:
    """Of Serve on this machine: Ray's workers bear the name of what they run."""
    count = 0
    for process in psutil.process_iter():
        try:
            count += (process.cmdline() or [""])[0].startswith("ray::ServeReplica:")
        except psutil.Error:  # it has just ended
            continue
    return count


def main() -> int:
    ray.init(address="auto", log_to_driver=False)
    context = ray.get_runtime_context()
    address, node_id = context.gcs_address, context.get_node_id()
    ray.shutdown()
    return 0 if drain(address, node_id, float(sys.argv[1]), num_replicas) else 1


if __name__ == "__main__":
    sys.exit(main())
