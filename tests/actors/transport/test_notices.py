"""Lines for whoever runs a server reach the process that started it."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import pytest
import ray

from actors.transport import notices
from actors.transport.notices import KIND, notify


@pytest.mark.ray
def test_lines_are_logged_and_reach_the_driver_in_order(
    ray_cluster: None, caplog: pytest.LogCaptureFixture
) -> None:
    raylet: Any = ray._raylet
    worker: Any = ray._private.worker.global_worker
    subscriber = raylet.GcsErrorSubscriber(address=worker.gcs_client.address)
    subscriber.subscribe()
    said = [notify("stages lost"), notify("stages rebuilt", engine_id="a7")]
    assert all(one is not None and one.result() is None for one in said)
    wanted = ["stages lost", "engine a7: stages rebuilt"]
    received: list[str] = []
    while len(received) < len(wanted):
        _, found = subscriber.poll()
        if found["type"] == KIND and found["job_id"] == worker.current_job_id.binary():
            received.append(found["error_message"])
    subscriber.close()
    assert received == wanted
    logged = [one for one in caplog.records if one.name == "legato.notices"]
    assert [(one.levelno, one.getMessage()) for one in logged] == [
        (logging.WARNING, line) for line in wanted
    ]


def test_a_line_for_which_no_thread_can_be_started_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who tells of a loss has to go on with the rebuild."""

    def refuse(thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(notices, "_in_order", ThreadPoolExecutor(1))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert notify("stages lost") is None
    assert caplog.messages == ["stages lost", "the cluster is not told: can't start new thread"]


def test_a_notice_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    notify("stages lost: The actor died.\n\tclass_name: Stage\n", "a7")
    assert caplog.messages == ["engine a7: stages lost: The actor died. class_name: Stage"]
