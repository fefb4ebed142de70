"""The Ray cluster that `legato serve` starts for itself: one machine, and only the processes it
needs."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# Of the driver's node: a dashboard that serves no page here, for which Ray would wait for seconds,
# the autoscaler's monitor, and the log copier for a driver that wants no logs.
_UNREAD = ("start_api_server", "start_monitor", "start_log_monitor")

# A raylet waits until its two agents have written the ports they listen on, and ends with them.
# A terminal sends Ctrl-C to both, too; without them the raylet could not end in order.
_BEGIN = "trap '' INT; " + 'write() { printf %s "$2" > "$1.new" && mv "$1.new" "$1"; }; '
# Nobody asks the dashboard's agent for anything, which takes over a second of a core to start.
_NO_DASHBOARD_AGENT = (
    _BEGIN
    + "for name in metrics_agent metrics_export dashboard_agent_listen; do "
    + 'write "$1/${name}_port_$2" -1; done; exec tail --pid=$PPID -f /dev/null'
)
# The agent for environments gets its port, so that the raylet need not wait for its imports.
_ENVIRONMENT_AGENT = _BEGIN + 'write "$1/runtime_env_agent_port_$2" "$3"; shift 3; exec "$@"'

# Processes that start at once and become Serve's controller, its task that builds the application,
# a replica, and one of its scheduler and stages. With more, each was later.
NUM_FIRST_WORKERS = 4


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
            _system_config={"prestart_worker_first_driver": True},
        )


def wait_for_end() -> str:
    """Returns once the cluster's raylet has ended, and with it every actor; says where logs are."""
    import ray

    node = ray._private.worker._global_node
    node.all_processes["raylet"][0].process.wait()
    return str(node.get_logs_dir_path())


@contextmanager
def _without_daemons() -> Iterator[None]:
    from ray._private import services
    from ray._private.node import Node

    kept = {name: getattr(Node, name) for name in _UNREAD}
    start = services.start_ray_process
    for name in _UNREAD:
        setattr(Node, name, lambda *_, **__: None)
    services.start_ray_process = _at_once(start)
    try:
        yield
    finally:
        services.start_ray_process = start
        for name, method in kept.items():
            setattr(Node, name, method)


def _at_once(start: Callable[..., Any]) -> Callable[..., Any]:
    """Ray's function that starts a process by its command, with a raylet that waits for nothing."""

    def start_process(command: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        if str(command[0]).endswith("/raylet"):
            command = _without_waits(list(map(str, command)))
        return start(command, *args, **kwargs)

    return start_process


def _without_waits(command: list[str]) -> list[str]:
    given = dict(part.split("=", 1) for part in command if "=" in part)
    with socket.create_server((given["--node_ip_address"], 0)) as free:
        port = str(free.getsockname()[1])
    node = [given["--session_dir"], given["--node_id"]]
    environments = given["--runtime_env_agent_command"]
    changed = {
        "--num_prestart_python_workers": str(NUM_FIRST_WORKERS),
        "--maximum_startup_concurrency": str(NUM_FIRST_WORKERS),
        "--dashboard_agent_command": _shell(_NO_DASHBOARD_AGENT, *node),
        "--runtime_env_agent_command": _shell(_ENVIRONMENT_AGENT, *node, port)
        + " "
        + environments.replace("--runtime-env-agent-port=0", f"--runtime-env-agent-port={port}"),
    }
    names = [part.partition("=")[0] for part in command]
    return [
        f"{name}={changed[name]}" if name in changed else part
        for name, part in zip(names, command, strict=True)
    ]


def _shell(script: str, *args: str) -> str:
    return subprocess.list2cmdline(["/bin/sh", "-c", script, "agent", *args])
