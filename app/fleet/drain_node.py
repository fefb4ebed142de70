"""`python -m app.fleet.drain_node SECONDS`: drains this Ray node before its removal.

Serve starts a replacement of each replica on another node and then stops the one here; an engine
that is stopped hands its streams over. Returns when no replica is left here, or after SECONDS.
Kubernetes runs it in each pod before deleting it (configs/deploy).
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import ray

_POLL_S = 1.0


def drain(address: str, node_id: str, within_s: float, num_left: Callable[[], int]) -> bool:
    """Request the drain and wait; False if replicas are left after the given seconds.

    address: of the cluster's GCS. num_left: replicas that are still on the node. Raises
    CalledProcessError where Ray refuses.
    """
    subprocess.run(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", address),
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
    """Serve's replicas on this machine: Ray names its worker processes after their task."""
    count = 0
    for process in psutil.process_iter():
        try:
            count += (process.cmdline() or [""])[0].startswith("ray::ServeReplica:")
        except psutil.Error:  # the process has just ended
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
