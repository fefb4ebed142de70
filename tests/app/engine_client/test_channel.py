"""The client side of a scheduler's socket: messages out and in, questions answered, its loss."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from actors.scheduling.events import DeliveryTook, Refuse
from actors.scheduling.interfaces import Quote, QuoteRequest
from actors.scheduling.request import Objective, Request, SamplingParams
from actors.transport.addresses import private_directory
from actors.transport.messages import (
    AbortRequests,
    Answer,
    Ask,
    IterationOutputs,
    IterationRecord,
    Readiness,
    RefusedSetting,
    RequestsStarted,
    StandbyTaken,
    SubmitRequests,
    Suspects,
    pack_kind,
    read_value,
    unpack_kind,
)
from actors.transport.wire import FrameProtocol, connect, listen
from app.engine_client.channel import EngineMessage, QuestionFailed, SchedulerChannel
from app.engine_client.client import EngineUnavailable, RequestRefused
from app.engine_client.delivery_times import REPORT_EVERY
from app.engine_client.streams import OpenRequests, Stream
from tests.standstill import pass_time


class Channel(SchedulerChannel):
    """A channel that is its own owner. told: what it says as the owner hears it, in order."""

    def __init__(self) -> None:
        super().__init__(OpenRequests(), self)
        self.told: list[Any] = []
        self._has_told = asyncio.Event()

    def on_records(self, records: Sequence[Any]) -> None:
        self._tell([IterationRecord(*record) for record in records])

    def on_refusal(self, refusal: Refuse) -> None:
        self._tell(refusal)

    def on_message(self, message: EngineMessage) -> None:
        self._tell(message)

    def on_lost(self) -> None:
        self._tell("lost")

    def _tell(self, message: Any) -> None:
        self.told.append(message)
        self._has_told.set()

    async def open(self, path: str) -> None:
        self._socket = await connect(path, self._received, self._lost)

    async def hears(self, count: int) -> list[Any]:
        async with asyncio.timeout(10):
            while len(self.told) < count:
                self._has_told.clear()
                await self._has_told.wait()
        return self.told


class Scheduler:
    """The other end of the socket."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[Any] = asyncio.Queue()
        self.socket = FrameProtocol(
            lambda frame: self.received.put_nowait(unpack_kind(frame)), lambda: None
        )

    def send(self, *messages: Any) -> None:
        for message in messages:
            self.socket.send(pack_kind(message))

    async def next(self) -> Any:
        return await asyncio.wait_for(self.received.get(), 10)


@pytest.fixture
async def ends() -> AsyncIterator[tuple[Channel, Scheduler]]:
    directory, channel, scheduler = private_directory(), Channel(), Scheduler()
    server, path = await listen(str(directory / "s"), lambda: scheduler.socket)
    await channel.open(path)
    channel.abort([])
    await scheduler.next()  # it is connected
    yield channel, scheduler
    server.close()
    scheduler.socket.close()
    shutil.rmtree(directory)


Ends = tuple[Channel, Scheduler]
REQUESTS = [Request(n, (5, 6), SamplingParams(4, seed=n), 1.5) for n in (1, 2)]


async def test_requests_and_aborts_arrive_as_they_were(ends: Ends) -> None:
    channel, scheduler = ends
    channel.submit(REQUESTS)
    channel.abort([2, 1])
    assert await scheduler.next() == SubmitRequests(tuple(REQUESTS))
    assert await scheduler.next() == AbortRequests((2, 1))


async def test_each_message_goes_where_it_belongs(ends: Ends) -> None:
    channel, scheduler = ends
    stream = Stream()
    channel.open_requests.add(REQUESTS, stream)
    record = IterationRecord(0, 1.0, 1.5, None, 1, 0, 1, (), 1, 0, 0, 9, 0, 0, 16)
    refusals = tuple(Refuse(n, "too long", "prompt") for n in (1, 2))
    scheduler.send(
        RequestsStarted((2,)),
        IterationOutputs(((2, 0, 7),)),
        Suspects(((1, 2),), (1,)),
        IterationOutputs((), (record,)),
        *refusals,
        Readiness(False),
        StandbyTaken("s"),
    )
    assert await channel.hears(5) == [[record], *refusals, Readiness(False), StandbyTaken("s")]
    entries = channel.open_requests
    assert [entries[n].has_started for n in (1, 2)] == [False, True]
    assert [entries[n].num_losses for n in (1, 2)] == [2, 0]
    (chunk,) = await stream.get()
    assert (chunk.index, chunk.tokens) == (1, [7])


async def test_the_scheduler_hears_by_how_much_deliveries_lengthen_gaps(ends: Ends) -> None:
    channel, scheduler = ends
    channel.open_requests.add(REQUESTS, Stream())
    for token in range(REPORT_EVERY + 1):
        # By the scheduler's clock each second message has spent more than a second on its way.
        sent_s = time.monotonic() - 5.0 + 3.0 * (token % 2)
        scheduler.send(IterationOutputs(((2, token, 7),), (), sent_s))
    message = await scheduler.next()
    assert isinstance(message, DeliveryTook)
    assert message.seconds == pytest.approx(3.0, abs=0.5)


async def test_answers_find_their_questions_in_any_order(ends: Ends) -> None:
    channel, scheduler = ends
    first = asyncio.create_task(channel.ask("status"))
    second = asyncio.create_task(channel.ask("load_adapter", 1, "folder"))
    asked = [await scheduler.next() for _ in range(2)]
    assert [(ask.question, ask.arguments) for ask in asked] == [
        ("status", ()),
        ("load_adapter", (1, "folder")),
    ]
    scheduler.send(Answer(99, "of no open question"))
    scheduler.send(Answer(asked[1].ticket, None, "KeyError: 'folder'"))
    scheduler.send(Answer(asked[0].ticket, {"num_waiting": 3}))
    with pytest.raises(QuestionFailed, match="KeyError: 'folder'"):
        await second
    assert await first == {"num_waiting": 3}
    assert channel.told == []


async def test_who_stood_still_waits_on_for_an_answer(ends: Ends) -> None:
    """As a replica for that to its heartbeat, after a machine was suspended."""
    channel, scheduler = ends
    asked = asyncio.create_task(channel.ask("stage_pids", within_s=1.0))
    ask: Ask = await scheduler.next()
    pass_time(2.0)  # the whole event loop stands still
    await asyncio.sleep(0)  # what is due is done before the answer comes
    scheduler.send(Answer(ask.ticket, 7))
    assert await asked == 7


async def test_an_answer_that_comes_too_late_is_dropped(ends: Ends) -> None:
    channel, scheduler = ends
    with pytest.raises(EngineUnavailable, match="does not answer"):
        await channel.ask("status", within_s=0.001)
    given_up = asyncio.create_task(channel.ask("status"))
    asked: list[Ask] = [await scheduler.next() for _ in range(2)]
    given_up.cancel()
    await asyncio.wait({given_up})
    again = asyncio.create_task(channel.ask("stage_pids"))
    last: Ask = await scheduler.next()
    assert len({ask.ticket for ask in (*asked, last)}) == 3
    for ask in (*asked, last, last):
        scheduler.send(Answer(ask.ticket, ask.question))
    assert await again == "stage_pids"
    last_of_all = asyncio.create_task(channel.ask("status"))
    scheduler.send(Answer((await scheduler.next()).ticket, 3))
    assert await last_of_all == 3
    assert channel._asked == {}


async def test_its_loss_is_told_once_and_fails_every_question(ends: Ends) -> None:
    channel, scheduler = ends
    asked = [asyncio.create_task(channel.ask("status")) for _ in range(2)]
    await scheduler.next()
    scheduler.send(Readiness(False))
    scheduler.socket.close()
    for question in asked:
        with pytest.raises(EngineUnavailable, match="has ended"):
            await question
    assert not channel.is_open
    assert await channel.hears(2) == [Readiness(False), "lost"]
    channel._lost()  # as a link does that sees the process end as well
    channel.submit(REQUESTS)  # dropped: the loss has been told
    channel.abort([1])
    async with asyncio.timeout(1):  # at once, not after the time that an answer may take
        with pytest.raises(EngineUnavailable, match="does not answer"):
            await channel.ask("status")
    assert len(channel.told) == 2


async def test_one_that_never_opened_is_not_lost() -> None:
    channel = Channel()
    channel._lost()
    assert not channel.is_open
    with pytest.raises(EngineUnavailable):
        await channel.ask("status")
    assert channel.told == []


async def test_a_quote_arrives_as_it_was(ends: Ends) -> None:
    channel, scheduler = ends
    wanted = QuoteRequest(100, 20, Objective(tbt_s=0.05), "tenant")
    quote = Quote(True, ttft_s=0.5, tbt_bound_s=0.04)
    asking = asyncio.create_task(channel.quote(wanted, 12.5))
    ask = await scheduler.next()
    assert (ask.question, ask.arguments[1]) == ("quote", 12.5)
    assert read_value(QuoteRequest, ask.arguments[0]) == wanted
    scheduler.send(Answer(ask.ticket, quote))
    assert await asking == quote


@pytest.mark.parametrize(
    ("value", "failure", "message", "param"),
    [
        (RefusedSetting("policy", "policy: unknown"), None, "policy: unknown", "policy"),
        (None, "TypeError: no", "invalid settings: TypeError: no", None),
    ],
)
async def test_settings_that_are_refused_say_which(
    ends: Ends, value: Any, failure: str | None, message: str, param: str | None
) -> None:
    channel, scheduler = ends
    changing = asyncio.create_task(channel.reconfigure({"policy": "magic"}))
    ask = await scheduler.next()
    assert (ask.question, ask.arguments) == ("reconfigure", ({"policy": "magic"},))
    scheduler.send(Answer(ask.ticket, value, failure))
    with pytest.raises(RequestRefused, match=message) as caught:
        await changing
    assert caught.value.param == param


async def test_settings_that_are_taken_raise_nothing(ends: Ends) -> None:
    channel, scheduler = ends
    changing = asyncio.create_task(channel.reconfigure({"policy": "orca"}))
    scheduler.send(Answer((await scheduler.next()).ticket, None))
    await changing


@pytest.mark.parametrize("value", [object(), 1 << 70, "\ud800"])
async def test_settings_that_cannot_be_sent_are_refused(ends: Ends, value: object) -> None:
    channel, scheduler = ends
    with pytest.raises(RequestRefused, match=r"slo\.tbt_ms: .* is no setting's value") as caught:
        await channel.reconfigure({"policy": "orca", "slo.tbt_ms": value})
    assert caught.value.param == "slo.tbt_ms"
    asking = asyncio.create_task(channel.ask("status"))
    scheduler.send(Answer((await scheduler.next()).ticket, 1))
    assert await asking == 1
