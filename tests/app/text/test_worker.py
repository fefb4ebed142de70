"""A job is not blamed where its process was killed, stopped or starved from outside."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from app.paths import PACKAGES
from app.text.worker import KillableWorker, WorkerStalled, WorkerTimeout, WorkerUnavailable

MODULE = "app.text.template_worker"
BUSY = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


Children = Callable[[], list[psutil.Process]]


@pytest.fixture
def children() -> Children:
    """Worker processes beside those of other tests' servers, which live in this process too."""
    before = _workers()
    return lambda: [child for child in _workers() if child not in before]


@pytest.fixture
def worker(children: Children) -> Iterator[KillableWorker]:
    worker = KillableWorker(MODULE)
    worker.start()
    yield worker
    worker.close()


def test_a_child_imports_no_package_of_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app/__init__.py").write_text("raise SystemExit('the user has an app too')")
    monkeypatch.syspath_prepend(PACKAGES)
    monkeypatch.chdir(tmp_path)
    worker = KillableWorker(MODULE)
    worker.start()
    worker.close()


def render(worker: KillableWorker, source: str = "ok", limit_s: float = 1.0) -> object:
    return worker.call({"template": source, "limit_s": 5.0, "variables": {}}, limit_s)


def _workers() -> list[psutil.Process]:
    own = psutil.Process().children()
    return [process for process in own if MODULE in process.cmdline()]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_job_is_done_though_its_process_was_not_there_for_it(
    worker: KillableWorker, children: Children, number: signal.Signals
) -> None:
    (child,) = children()
    os.kill(child.pid, number)
    assert render(worker) == {"text": "ok"}
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_job_is_done_though_its_process_was_killed_at_it(
    worker: KillableWorker, children: Children
) -> None:
    def strike() -> None:
        (child,) = children()
        wait_for(lambda: child.cpu_times().user > begin_s + 0.1)
        child.kill()

    (child,) = children()
    begin_s = child.cpu_times().user
    striker = threading.Thread(target=strike)
    striker.start()
    slow = "{% for i in range(9999) %}{% for j in range(900) %}{% endfor %}{% endfor %}ok"
    assert render(worker, slow, limit_s=30.0) == {"text": "ok"}
    striker.join()


def test_one_that_overruns_by_itself_is_not_tried_again(
    worker: KillableWorker, children: Children
) -> None:
    (child,) = children()
    with pytest.raises(WorkerTimeout) as raised:
        render(worker, BUSY, limit_s=0.5)
    if isinstance(raised.value, WorkerStalled):
        pytest.skip("this machine gave it no processor")
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert children() == []  # no second one was started for it


@pytest.mark.parametrize("has_child", [True, False])
def test_no_room_for_a_process_says_nothing_of_the_job(
    worker: KillableWorker, children: Children, has_child: bool
) -> None:
    if not has_child:
        worker.close()
    _, hard = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_file = os.dup(0)
    os.close(next_file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_file, hard))
    try:
        with pytest.raises(WorkerUnavailable, match="Too many open files"):
            render(worker)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert render(worker) == {"text": "ok"}
    assert len(children()) == 1


def wait_for(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_a_child_that_does_not_start_says_nothing_about_the_job() -> None:
    """The second try, with another child, meets the same: this module never says that it is
    ready."""
    worker = KillableWorker("code", start_limit_s=0.3)
    try:
        with pytest.raises(WorkerStalled, match="did not start"):
            worker.call({}, 1.0)
    finally:
        worker.close()
