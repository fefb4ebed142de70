"""The Ray cluster that `legato serve` starts for itself: one machine, and only the processes it
needs."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from app.cli.forked_workers import ForkServer
from app.cli.notices import show_notices
from app.paths import PACKAGES

# Of the driver's node: a dashboard that serves no page here, for which Ray would wait for seconds,
# the autoscaler's monitor, and the log copier for a driver that wants no logs.
_UNREAD = ("start_api_server", "start_monitor", "start_log_monitor")

# Processes that start at once and become Serve's controller, its task that builds the application,
# and a replica. The next ones are forks that have torch.
NUM_FIRST_WORKERS = 3


def start_ray(
    num_cpus: int, forks: ForkServer | None = None, **options: Any
) -> tuple[subprocess.Popen[bytes], str]:
    """A cluster of this process's own; returns its raylet, with which every actor ends, and the
    folder of its logs. The environment must be set (`set_environment`). forks: of its workers,
    which otherwise import for themselves. options: of `ray.init`."""
    import ray  # here, because its import takes a second and reads the environment

    with _changed(forks):
        ray.init(
            address="local",  # never join a cluster that already runs here
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _system_config={"prestart_worker_first_driver": True},
            job_config=_own_packages_first(),
            **options,
        )
    node = ray._private.worker._global_node
    return node.all_processes["raylet"][0].process, str(node.get_logs_dir_path())


def _own_packages_first() -> Any:
    """Workers search the folders of a job from the last to the first. Ray appends the working
    folder, where the user may have a package `app` too."""
    from ray.job_config import JobConfig

    class OwnPackagesFirst(JobConfig):
        def _serialize(self) -> Any:
            self._py_driver_sys_path.append(str(PACKAGES))
            return super()._serialize()

    return OwnPackagesFirst()


@contextmanager
def _changed(forks: ForkServer | None) -> Iterator[None]:
    from ray._private import services, worker
    from ray._private.node import Node

    changes: list[tuple[Any, str, Any]] = [
        *((Node, name, lambda *_, **__: None) for name in _UNREAD),
        (services, "start_ray_process", _at_once(services.start_ray_process, forks)),
        # A signal to the command's group, as `timeout` sends it, reaches only the command.
        (services, "ConsolePopen", partial(services.ConsolePopen, start_new_session=True)),
        (worker, "listen_error_messages", show_notices),
    ]
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, changed in changes:
        setattr(owner, name, changed)
    try:
        yield
    finally:
        for owner, name, own in kept:
            setattr(owner, name, own)


def _at_once(start: Callable[..., Any], forks: ForkServer | None) -> Callable[..., Any]:
    """Ray's function that starts a process by its command, with a raylet that waits for nothing."""

    def start_process(command: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        if str(command[0]).endswith("/raylet"):
            command = _without_waits(list(map(str, command)))
            if forks is not None:
                command = forks.open(command)
            process = start(command, *args, **kwargs)
            import_module("ray.serve._private.api")  # half a second, in which it starts
            return process
        return start(command, *args, **kwargs)

    return start_process


_UNTIL_THE_RAYLET_ENDS = ["/bin/sh", "-c", "exec cat", "agent"]  # ignores arguments that follow


def _without_waits(command: list[str]) -> list[str]:
    """A raylet waits until its two agents have written the ports that they listen on, and ends with
    them. The one for environments gets a port that is written before it has imported what it needs.
    Nobody asks the dashboard's for anything, which takes over a second of a core to start; in its
    place a process waits for the end of its input, a pipe from the raylet."""
    _raylet: Any = import_module("ray._raylet")  # which has no types
    given = dict(part.split("=", 1) for part in command if "=" in part)
    port = _reserved_port(given["--node_ip_address"])
    ports = {
        _raylet.METRICS_AGENT_PORT_NAME: -1,  # there is none
        _raylet.METRICS_EXPORT_PORT_NAME: -1,
        _raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME: -1,
        _raylet.RUNTIME_ENV_AGENT_PORT_NAME: port,
    }
    for name, number in ports.items():
        _raylet.persist_port(given["--session_dir"], given["--node_id"], name, number)
    at_once = max(NUM_FIRST_WORKERS, int(given["--maximum_startup_concurrency"]))
    changed = {
        "--num_prestart_python_workers": str(NUM_FIRST_WORKERS),
        "--maximum_startup_concurrency": str(at_once),
        "--dashboard_agent_command": subprocess.list2cmdline(_UNTIL_THE_RAYLET_ENDS),
        # Niced: it takes half a second of a core to start, and no process here needs it then.
        "--runtime_env_agent_command": "nice -n 19 "
        + given["--runtime_env_agent_command"].replace(
            "--runtime-env-agent-port=0", f"--runtime-env-agent-port={port}"
        ),
    }
    names = [part.partition("=")[0] for part in command]
    return [
        f"{name}={changed[name]}" if name in changed else part
        for name, part in zip(names, command, strict=True)
    ]


_reserved: list[socket.socket] = []  # open as long as this process


def _reserved_port(address: str) -> int:
    """A free port that the system gives to nobody, until one binds it by its number."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    own = socket.socket(family)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    own.bind((address, 0))
    _reserved.append(own)
    return int(own.getsockname()[1])
