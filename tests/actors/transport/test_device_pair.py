"""Tensors from process to process: whole and in order, or an error in time. Over gloo; of NCCL what
is asked of it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.transport import device_pair
from actors.transport.addresses import free_address
from actors.transport.device_pair import DevicePair, TransferFailed

CPU = torch.device("cpu")
LIMIT_S = 30.0
NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def started(work: Callable[[], Any]) -> Callable[[], Any]:
    """Run it on a thread; the call waits for what it returns or raises."""
    answer: list[Any] = []

    def run() -> None:
        try:
            answer.append(work())
        except TransferFailed as error:
            answer.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def wait() -> Any:
        thread.join(60)
        assert not thread.is_alive()
        return answer[0]

    return wait


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_TWO])])
def sides(request: pytest.FixtureRequest) -> Iterator[tuple[DevicePair, DevicePair]]:
    address = free_address("127.0.0.1")
    devices = [CPU, CPU]
    if request.param == "cuda":
        devices = [torch.device("cuda", rank) for rank in range(2)]
    other = started(lambda: DevicePair(1, address, devices[1]))
    pair = DevicePair(0, address, devices[0]), other()
    yield pair
    for side in pair:
        side.close()


def test_tensors_arrive_whole_and_in_order(sides: tuple[DevicePair, DevicePair]) -> None:
    sent = [torch.arange(n).to(torch.uint8) for n in (1, 5000, 1 << 20)]
    sent += [torch.arange(24.0).view(2, 3, 4).to(t) for t in (torch.bfloat16, torch.float8_e4m3fn)]
    for source, target in (sides, sides[::-1]):
        landed = [torch.zeros_like(x, device=target.device) for x in sent]
        done = started(lambda t=target, into=landed: t.receive(into, LIMIT_S))  # type: ignore[misc]
        source.send([x.to(source.device) for x in sent], LIMIT_S)
        assert done() is None
        for before, after in zip(sent, landed, strict=True):
            assert torch.equal(before.float(), after.cpu().float())


def test_nothing_comes_in_time(sides: tuple[DevicePair, DevicePair]) -> None:
    begun_s = time.monotonic()
    with pytest.raises(TransferFailed):
        sides[1].receive([torch.zeros(8, device=sides[1].device)], 0.1)
    assert time.monotonic() - begun_s < 10, "gloo's own limit is twice that"
    with pytest.raises(TransferFailed, match="the pair has ended"):
        sides[1].send([torch.zeros(8, device=sides[1].device)], LIMIT_S)


def test_the_other_side_ends_meanwhile(sides: tuple[DevicePair, DevicePair]) -> None:
    x = torch.zeros(8, device=sides[0].device)
    waits = started(lambda: sides[0].receive([x], LIMIT_S))
    begun_s = time.monotonic()
    sides[1].close()
    assert isinstance(waits(), TransferFailed)
    assert time.monotonic() - begun_s < LIMIT_S / 2, "at once, not at the limit"
    sides[1].close()  # once more is no error


@pytest.mark.parametrize("rank", [0, 1])
def test_a_side_that_stays_alone(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setattr(device_pair, "_JOIN_WITHIN_S", 0.2)
    with pytest.raises(TransferFailed):
        DevicePair(rank, free_address("127.0.0.1"), CPU)


class Nccl:
    """A group whose operations end when `is_done`."""

    is_done = True
    made: list[Nccl]

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        assert options.is_high_priority_stream
        self.calls: list[str] = []
        self.is_aborted = threading.Event()
        Nccl.made.append(self)

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Nccl:
        self.calls.append(f"send {len(tensors[0])} to {rank}")
        return self

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Nccl:
        self.calls.append(f"receive {len(tensors[0])} from {rank}")
        return self

    def wait(self) -> None:
        self.calls.append("the stream waits")

    def abort(self) -> None:
        self.is_aborted.set()


class Event:
    def record(self) -> None:
        pass

    def query(self) -> bool:
        return Nccl.is_done


@pytest.fixture
def nccl_side(monkeypatch: pytest.MonkeyPatch) -> DevicePair:
    monkeypatch.setattr(Nccl, "made", [], raising=False)
    monkeypatch.setattr(device_pair.dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(device_pair, "nccl_options", lambda _: SimpleNamespace())
    monkeypatch.setattr(device_pair, "make_store", lambda *_: None)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.ones(1))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: priority)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())

    return DevicePair(1, "127.0.0.1:1", torch.device("cuda"))


def test_nccl_waits_on_the_device_and_is_aborted(
    nccl_side: DevicePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that waits for a dead peer would occupy the GPU for ever."""
    (nccl,) = Nccl.made
    probe = ["send 4 to 0", "the stream waits", "receive 4 from 0", "the stream waits"]
    assert nccl.calls == probe
    monkeypatch.setattr(Nccl, "is_done", False)
    with pytest.raises(TransferFailed, match="not done within"):
        nccl_side.receive([torch.ones(3)], 0.01)
    assert nccl.calls[4:] == ["receive 12 from 0", "the stream waits"]
    assert nccl.is_aborted.wait(LIMIT_S), "on a thread of its own: it may take a minute"


def test_what_ends_by_an_abort_has_not_arrived(
    nccl_side: DevicePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event of an aborted kernel is like that of a whole one."""

    def query(event: Event) -> bool:
        nccl_side.close()  # as another thread does
        return True

    monkeypatch.setattr(Event, "query", query)
    with pytest.raises(TransferFailed, match="ended meanwhile"):
        nccl_side.receive([torch.ones(3)], LIMIT_S)
