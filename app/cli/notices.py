"""What the terminal of `legato serve` shows of a running server: one line per event."""

from __future__ import annotations

import re
import threading
import time
from typing import Any, Final

from actors.transport.notices import KIND
from app.terminal import console

_DIED: Final = "worker_died"  # Ray's kind of a paragraph that names the process only by its id
_PID: Final = re.compile(r"Worker PID: (\d+)")
# Their deaths are noticed and told by the process above them.
_WATCHED: Final = ("SchedulerActor", "StageActor")


def show_notices(worker: Any, stopped: threading.Event) -> None:
    """Print lines until Ray stops: runs in the place, and with the arguments, of the thread by
    which Ray prints what concerns a job."""
    import ray  # here, because its import takes a second

    subscriber = worker.gcs_error_subscriber
    subscriber.subscribe()
    jobs = (None, worker.current_job_id.binary(), ray.JobID.nil().binary())
    try:
        while not stopped.is_set():
            _, said = subscriber.poll()
            if said is not None and said["job_id"] in jobs:
                line = _line(said["type"], said["error_message"])
                if line is not None:
                    now = time.strftime("%Y-%m-%d %H:%M:%S")
                    console.print(f"{now} {line}", markup=False)
    except (OSError, ConnectionError):  # Ray has ended, which the command notices by itself
        return


def _line(kind: str, message: str) -> str | None:
    """None for what says nothing that is not told otherwise, and of Ray's while it is silenced."""
    from ray._private.worker import _worker_logs_enabled as is_heard

    if kind == KIND:
        return message
    if not is_heard:
        return None
    found = _PID.search(message)
    if kind != _DIED or found is None:
        return "Ray: " + " ".join(message.split())
    name = _actor(int(found[1]))
    return None if name in _WATCHED else f"process {found[1]} ({name}) died: Ray replaces it"


def _actor(pid: int) -> str:
    """Its class, once the cluster's table of actors has it."""
    from ray._private import state

    actors = [actor for actor in state.actors().values() if actor["Pid"] == pid]
    return str(actors[-1]["ActorClassName"]) if actors else "a worker"
