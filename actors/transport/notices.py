"""Lines for whoever runs the server: they see the terminal of the command that started it, and not
the logs of Ray's workers. That command prints them (`app/cli/notices.py`)."""

from __future__ import annotations

import logging
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

logger = logging.getLogger("legato.notices")

KIND: Final = "legato"  # of a message to a job's driver, beside Ray's own kinds
_WITHIN_S: Final = 2.0
_in_order: Final = ThreadPoolExecutor(1, "legato-notices")  # nobody waits for the cluster


def notify(message: str, engine_id: str | None = None) -> Future[None] | None:
    """Log a line and publish it. Returns what is done once it is out, within seconds; None outside
    a cluster, or without a thread for it, where there is only the log. Raises nothing: it tells of
    what goes wrong. engine_id: of one engine among several."""
    line = " ".join(message.split())  # an error's message may have several
    text = line if engine_id is None else f"engine {engine_id}: {line}"
    logger.warning("%s", text)
    ray: Any = sys.modules.get("ray")  # the command reads `KIND` before Ray may be imported
    is_inside = ray is not None and ray.is_initialized()
    if not is_inside:
        return None
    try:
        return _in_order.submit(_publish, text)
    except RuntimeError as error:  # no thread can be started: the log has the line
        logger.warning("the cluster is not told: %s", error)
        return None


def _publish(text: str) -> None:
    import ray

    worker: Any = ray._private.worker.global_worker  # which has no types
    job = worker.current_job_id
    worker.gcs_client.publish_error(job.hex().encode(), KIND, text, job, _WITHIN_S)
