"""Fronts of one scheduler: each has ids of its own, and none speaks for another."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

import actors.engine.peers as peers_module
from actors.engine.peers import FrontAddress, Message, Peers, connection_of, first_id
from actors.scheduling.events import DeliveryTook, FetchEarly, Refuse
from actors.scheduling.request import Request, SamplingParams
from actors.transport.addresses import new_local_address, new_secret
from actors.transport.messages import (
    AbortRequests,
    Hello,
    IterationOutputs,
    KVSaved,
    RequestsStarted,
    SubmitRequests,
    Welcome,
    pack_kind,
    unpack_kind,
)
from actors.transport.wire import FrameProtocol, connect
from tests.actors.fleet.pictures import snapshot


class Front:
    def __init__(self) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        self.gone = asyncio.Event()
        self.socket: FrameProtocol

    async def connect(
        self, fronts: FrontAddress, now_s: float | None = None, tcp: str | None = None
    ) -> Welcome:
        self.socket = await connect(
            tcp or fronts.local,
            lambda frame: self.messages.put_nowait(unpack_kind(frame)),
            self.gone.set,
            fronts.secret,
        )
        self.send(Hello(time.monotonic() if now_s is None else now_s))
        welcome = await self.next()
        assert isinstance(welcome, Welcome)
        return welcome

    def send(self, message: Any) -> None:
        self.socket.send(pack_kind(message))

    async def next(self) -> Any:
        return await asyncio.wait_for(self.messages.get(), 10)


class Scheduler:
    def __init__(self) -> None:
        self.fronts = FrontAddress("e", new_local_address(), "127.0.0.1", new_secret())
        self.tcp: str | None = None
        self.received: asyncio.Queue[tuple[int, Message]] = asyncio.Queue()
        self.gone: asyncio.Queue[int] = asyncio.Queue()
        self.peers = Peers(lambda *message: self.received.put_nowait(message), self.gone.put_nowait)

    async def open(self) -> None:
        self.tcp = await self.peers.listen(
            self.fronts, lambda number: Welcome(number, time.monotonic(), 256, (0,), 8)
        )


@pytest.fixture
async def scheduler() -> AsyncIterator[Scheduler]:
    made = Scheduler()
    await made.open()
    yield made
    made.peers.close_fronts()


def request(request_id: int, arrival_s: float = 0.0) -> SubmitRequests:
    return SubmitRequests((Request(request_id, (1, 2), SamplingParams(4), arrival_s),))


async def test_each_front_gets_its_own_outputs(scheduler: Scheduler) -> None:
    fronts = [Front(), Front()]
    numbers = [(await front.connect(scheduler.fronts)).number for front in fronts]
    ids = [first_id(number) + 1 for number in numbers]
    assert [connection_of(i) for i in ids] == numbers
    assert len(set(numbers)) == scheduler.peers.num_fronts == 2
    for front, request_id in zip(fronts, ids, strict=True):
        front.send(request(request_id))
        number, message = await asyncio.wait_for(scheduler.received.get(), 10)
        assert (number, message.requests[0].request_id) == (connection_of(request_id), request_id)
    scheduler.peers.send_outputs([(ids[0], 0, 7), (ids[1], 0, 8), (ids[0], 1, 9)], [])
    assert (await fronts[0].next()).rows == ((ids[0], 0, 7), (ids[0], 1, 9))
    assert (await fronts[1].next()).rows == ((ids[1], 0, 8),)
    scheduler.peers.send_outputs([(ids[1], 1, 3)], [])
    scheduler.peers.send_started([ids[1]])
    scheduler.peers.send_refusal(Refuse(ids[0], "no"))
    assert isinstance(await fronts[1].next(), IterationOutputs)
    assert (await fronts[1].next()) == RequestsStarted((ids[1],))
    assert (await fronts[0].next()) == Refuse(ids[0], "no")
    fronts[0].socket.close()
    assert await asyncio.wait_for(scheduler.gone.get(), 10) == numbers[0]
    assert not scheduler.peers.knows(ids[0])
    assert scheduler.peers.num_fronts == 1
    assert scheduler.peers.knows(ids[1])
    scheduler.peers.send_outputs([(ids[0], 2, (7,))], [])  # no front's any more


@pytest.mark.parametrize("kind", ["submit", "abort", "hello"])
async def test_a_front_that_speaks_out_of_turn_is_cut_off(scheduler: Scheduler, kind: str) -> None:
    honest, other = Front(), Front()
    theirs = first_id((await honest.connect(scheduler.fronts)).number) + 1
    await other.connect(scheduler.fronts)
    messages = {"submit": request(theirs), "abort": AbortRequests((theirs,)), "hello": Hello(0.0)}
    other.send(messages[kind])
    await asyncio.wait_for(other.gone.wait(), 10)
    assert scheduler.received.empty()
    honest.send(request(theirs))
    assert (await asyncio.wait_for(scheduler.received.get(), 10))[1].requests[
        0
    ].request_id == theirs


async def test_a_front_that_does_not_read_is_gone_at_once(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its requests end, although what it has not read can never be sent."""
    monkeypatch.setattr(peers_module, "_MOST_UNSENT_BYTES", 1 << 20)
    reader = Front()
    await reader.connect(scheduler.fronts)
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.connect(f"\0{scheduler.fronts.local[1:]}")
        hello, asked = pack_kind(Hello(time.monotonic())), pack_kind(request(first_id(2) + 1))
        frames = b"".join(len(f).to_bytes(4, "little") + f for f in (hello, asked))
        frozen.sendall(scheduler.fronts.secret + frames)
        number, _ = await asyncio.wait_for(scheduler.received.get(), 10)
        for _ in range(4):
            scheduler.peers.send_refusal(Refuse(first_id(number), "x" * (1 << 20)))
        for _ in range(3):
            scheduler.peers.publish(snapshot("e"))
        assert await asyncio.wait_for(scheduler.gone.get(), 10) == number
    assert not scheduler.peers.knows(first_id(number))
    assert caplog.text.count("it does not read") == 1
    for _ in range(3):
        assert (await reader.next()).engine_id == "e"


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="no such option here")
async def test_a_front_on_another_node_that_takes_nothing_is_gone_in_time(
    scheduler: Scheduler,
) -> None:
    """A node that vanishes closes no socket."""
    front = Front()
    number = (await front.connect(scheduler.fronts, tcp=scheduler.tcp)).number
    accepted = scheduler.peers._fronts[number].socket
    assert accepted is not None
    assert accepted._transport is not None
    sock = accepted._transport.get_extra_info("socket")
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000


async def test_a_front_passes_on_what_another_engine_has_saved(scheduler: Scheduler) -> None:
    front = Front()
    number = (await front.connect(scheduler.fronts)).number
    scheduler.peers.send_saved(saved := KVSaved(first_id(number) + 1, (b"x",)))
    assert await front.next() == saved
    for message in (FetchEarly((b"x", b"y")), DeliveryTook(0.01)):
        front.send(message)
        assert await asyncio.wait_for(scheduler.received.get(), 10) == (number, message)


async def test_a_clock_of_another_node_is_translated(scheduler: Scheduler) -> None:
    """And none of the same node, however late its hello is read."""
    far, near = Front(), Front()
    behind_s = 5000.0
    then_s = time.monotonic() - behind_s
    number = (await far.connect(scheduler.fronts, then_s, scheduler.tcp)).number
    now_s = time.monotonic()
    far.send(request(first_id(number) + 1, now_s - behind_s))
    _, message = await asyncio.wait_for(scheduler.received.get(), 10)
    assert isinstance(message, SubmitRequests)
    assert message.requests[0].arrival_s == pytest.approx(now_s, abs=1.0)
    number = (await near.connect(scheduler.fronts, then_s)).number
    near.send(request(first_id(number) + 1, 123.0))
    _, message = await asyncio.wait_for(scheduler.received.get(), 10)
    assert isinstance(message, SubmitRequests)
    assert message.requests[0].arrival_s == 123.0


async def test_a_hello_of_another_node_that_was_read_late_makes_no_request_younger(
    scheduler: Scheduler,
) -> None:
    front, behind_s, late_s = Front(), 5000.0, 400.0
    then_s = time.monotonic() - behind_s - late_s
    number = (await front.connect(scheduler.fronts, then_s, scheduler.tcp)).number
    for waited_s in (0.0, 200.0):
        now_s = time.monotonic()
        front.send(request(first_id(number) + 1, now_s - behind_s - waited_s))
        _, message = await asyncio.wait_for(scheduler.received.get(), 10)
        assert isinstance(message, SubmitRequests)
        assert message.requests[0].arrival_s == pytest.approx(now_s - waited_s, abs=60.0)


async def test_a_front_without_the_secret_hears_nothing(scheduler: Scheduler) -> None:
    intruder = Front()
    fronts = FrontAddress("e", scheduler.fronts.local, None, new_secret())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(intruder.connect(fronts), 0.5)
    await asyncio.wait_for(intruder.gone.wait(), 10)
    assert not scheduler.peers.knows(first_id(1))
