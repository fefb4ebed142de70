"""The client side of a scheduler's socket, for a replica or a front.

Messages are encoded and decoded here; rows of outputs are decoded on delivery (`streams`).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from actors.engine.peers import Message
from actors.fleet.snapshot import EngineSnapshot, PrefixUpdate
from actors.scheduling.events import DeliveryTook, FetchEarly, MayReturn, Refuse, TurnedAway
from actors.scheduling.interfaces import Quote, QuoteRequest
from actors.scheduling.request import Request
from actors.transport.messages import (
    AbortRequests,
    Answer,
    Ask,
    Hello,
    IterationOutputs,
    KVSaved,
    Question,
    Readiness,
    RefusedSetting,
    RequestsStarted,
    StandbyTaken,
    SubmitRequests,
    Suspects,
    Welcome,
    pack,
    pack_kind,
    read_value,
    unpack_kind,
)
from actors.transport.running_time import running_timeout
from actors.transport.wire import FrameProtocol
from app.engine_client.client import EngineUnavailable, RequestRefused
from app.engine_client.delivery_times import REPORT_EVERY, DeliveryTimes
from app.engine_client.streams import OpenRequests

_ANSWER_WITHIN_S = 10.0
_RESET_WITHIN_S = 600.0  # what is on disk is deleted

# Messages that are no answer and no output.
EngineMessage = Readiness | StandbyTaken | EngineSnapshot | PrefixUpdate | Welcome | KVSaved


class QuestionFailed(RuntimeError):
    """The scheduler raised an error instead of answering; the message names it."""


class ChannelOwner(Protocol):
    """What the owner of a channel does with what the scheduler says."""

    def on_records(self, records: Sequence[Any]) -> None:
        """Rows of iterations, as `IterationOutputs` holds them."""
        ...

    def on_refusal(self, refusal: Refuse) -> None: ...

    def on_message(self, message: EngineMessage) -> None: ...

    def on_lost(self) -> None:
        """The socket has ended, before `close`; called once."""
        ...


class SchedulerChannel:
    """open_requests: those at this scheduler; its outputs are delivered to them."""

    def __init__(self, open_requests: OpenRequests, owner: ChannelOwner) -> None:
        self.open_requests = open_requests
        self._owner = owner
        self._socket: FrameProtocol | None = None
        self._times = DeliveryTimes()
        self._delays_s: list[float] = []  # of the latest deliveries
        self._tickets = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def submit(self, requests: Sequence[Request]) -> None:
        self._send(SubmitRequests(tuple(requests)))

    def abort(self, request_ids: Sequence[int]) -> None:
        self._send(AbortRequests(tuple(request_ids)))

    def fetch_early(self, digests: Sequence[bytes], is_last: bool = False) -> None:
        """A peer of the engine has saved these blocks of a stream that will come. is_last: it comes
        once they are there."""
        self._send(FetchEarly(tuple(digests), is_last))

    def turned_away(self, refused: Sequence[MayReturn]) -> None:
        """Say what was refused here in the scheduler's place, as `events.TurnedAway`."""
        self._send(TurnedAway(tuple(refused)))

    def _send(self, message: Message | Hello) -> None:
        """Send; dropped if the scheduler has ended, which `ChannelOwner.on_lost` reports."""
        if self._socket is not None:
            self._socket.send(pack_kind(message))

    def _received(self, frame: bytes) -> None:
        message = unpack_kind(frame)
        if isinstance(message, IterationOutputs):
            if message.rows:
                self.open_requests.deliver(message.rows)
                self._delays_s.append(time.monotonic() - message.sent_s)
                if len(self._delays_s) == REPORT_EVERY:
                    asyncio.get_running_loop().call_soon(self._report_delays)
            if message.records:
                self._owner.on_records(message.records)
        elif isinstance(message, RequestsStarted):
            self.open_requests.started(message.request_ids)
        elif isinstance(message, Suspects):
            suspected, lost = self.open_requests.suspected, message.stages_are_lost
            suspected(message.losses, message.on_trial, lost)
        elif isinstance(message, Refuse):
            self._owner.on_refusal(message)
        elif isinstance(message, Answer):
            self._answered(message)
        else:
            self._owner.on_message(message)

    def _report_delays(self) -> None:
        self._send(DeliveryTook(self._times.report(self._delays_s)))
        self._delays_s.clear()

    async def ask(self, question: Question, *arguments: Any, within_s: float | None = None) -> Any:
        """The scheduler's answer.

        Raises EngineUnavailable if none comes, QuestionFailed if the scheduler raised.
        """
        ticket = next(self._tickets)
        answer = self._asked[ticket] = asyncio.get_running_loop().create_future()
        try:
            self._send(Ask(ticket, question, arguments))
            if self._socket is None:
                raise TimeoutError
            async with running_timeout(_ANSWER_WITHIN_S if within_s is None else within_s):
                return await answer
        except TimeoutError as error:
            raise EngineUnavailable("the scheduler does not answer") from error
        finally:
            del self._asked[ticket]

    async def quote(self, asked: QuoteRequest, now_s: float) -> Quote:
        """now_s: on the scheduler's clock. Raises as `ask` does."""
        return read_value(Quote, await self.ask("quote", asked, now_s))

    async def reconfigure(self, changes: Mapping[str, Any]) -> None:
        """Change settings live; raises RequestRefused naming a bad key, EngineUnavailable."""
        await self._ask_to("reconfigure", changes)

    async def reset_prefix_cache(self) -> None:
        """See `EngineClient`. Raises as `ask` does."""
        await self.ask("reset_prefix_cache", within_s=_RESET_WITHIN_S)

    async def try_changes(self, changes: Mapping[str, Any]) -> None:
        """Raises as `reconfigure` would, and changes nothing."""
        await self._ask_to("try_changes", changes)

    async def _ask_to(self, question: Question, changes: Mapping[str, Any]) -> None:
        for key, value in changes.items():
            try:
                pack((key, value))
            except (TypeError, ValueError, OverflowError) as error:
                shown = f"{value!r:.40}"
                raise RequestRefused(f"{key}: {shown} is no setting's value", param=key) from error
        try:
            answer = await self.ask(question, dict(changes))
        except (QuestionFailed, TypeError, ValueError, OverflowError) as error:
            raise RequestRefused(f"invalid settings: {error}") from error
        if answer is not None:
            refused = read_value(RefusedSetting, answer)
            raise RequestRefused(refused.message, param=refused.param)

    def _answered(self, message: Answer) -> None:
        answer = self._asked.get(message.ticket)
        if answer is None or answer.done():
            return
        if message.failure is None:
            answer.set_result(message.value)
        else:
            answer.set_exception(QuestionFailed(message.failure))

    def _lost(self) -> None:
        if self._socket is None:
            return  # known already, or not yet open
        self._forget()
        self._owner.on_lost()

    def _forget(self) -> None:
        """From now on there is no scheduler."""
        self._socket = None
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(EngineUnavailable("the scheduler has ended"))
