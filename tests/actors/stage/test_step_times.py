"""How long a stage's device took, told without waiting for it."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.stage import step_times
from actors.stage.step_times import StepTimes
from actors.transport.addresses import private_directory
from actors.transport.messages import STAGE_TIMES
from actors.transport.wire import Mailbox, Sender

TOOK_S = 2.5


class Device:
    """Its events lie TOOK_S apart and are not reached before `finish`."""

    def __init__(self) -> None:
        self.finished = threading.Event()

    def new_event(self) -> Event:
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.is_recorded = False

    def record(self) -> None:
        self.is_recorded = True

    def synchronize(self) -> None:
        assert self.is_recorded
        assert self.device.finished.wait(30)

    def elapsed_time(self, end: Event) -> float:
        assert self.device.finished.is_set(), "asked of events that are not reached"
        assert self.is_recorded
        assert end.is_recorded
        return 1000 * TOOK_S


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    device = Device()
    monkeypatch.setattr(step_times, "new_event", device.new_event)
    yield device
    device.finished.set()


@pytest.fixture
def folder() -> Iterator[Path]:
    folder = private_directory()
    yield folder
    shutil.rmtree(folder)


def test_an_earlier_stage_goes_on_and_reports_when_its_device_is_done(
    device: Device, folder: Path
) -> None:
    mailbox = Mailbox(str(folder / "times"))
    times = StepTimes(1, Sender(str(folder / "times")))
    for ticket in (40, 41):
        assert times.end(ticket, times.begin()) is None
    device.finished.set()
    for ticket in (40, 41):
        number, stage, begin_s, end_s = STAGE_TIMES.unpack(mailbox.receive())
        assert (number, stage) == (ticket, 1)
        assert end_s - begin_s == pytest.approx(TOOK_S)
        assert end_s == pytest.approx(time.monotonic(), abs=60)
    mailbox.close()


def test_the_last_stage_knows_at_once(device: Device) -> None:
    times = StepTimes(2, None)
    begun = times.begin()
    device.finished.set()
    took = times.end(40, begun)
    assert took is not None
    assert took[1] - took[0] == pytest.approx(TOOK_S)
