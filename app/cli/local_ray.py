"""The Ray cluster that `legato serve` starts for itself: one machine, and only the processes it
needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# Of the driver's node: a dashboard that serves no page here, for which Ray would wait for seconds,
# the autoscaler's monitor, and the log copier for a driver that wants no logs.
_UNREAD = ("start_api_server", "start_monitor", "start_log_monitor")


def start_ray(num_cpus: int) -> None:
    """A cluster of this process's own. The environment must be set (`set_environment`)."""
    import ray  # here, because its import takes seconds and reads the environment

    with _without_daemons():
        ray.init(
            address="local",  # never join a cluster that already runs here
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )


@contextmanager
def _without_daemons() -> Iterator[None]:
    from ray._private.node import Node

    kept = {name: getattr(Node, name) for name in _UNREAD}
    for name in _UNREAD:
        setattr(Node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, method in kept.items():
            setattr(Node, name, method)
