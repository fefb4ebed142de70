"""A chaotic run: streams that never end, faults at random times, and what is known of both."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app.bench.chaos import faults
from app.bench.chaos.fleet_faults import FLEET_FAULTS
from app.bench.chaos.own_server import OwnServer
from app.bench.chaos.requests import SILENT_S, ChaosAnswer, ChaosRequest, ask, judge
from app.bench.report import MeasurementError
from app.bench.terminal import console

if TYPE_CHECKING:
    import aiohttp

RECOVERS_WITHIN_S = 90.0
FLEET_RECOVERS_WITHIN_S = 240.0  # new engines load their models beside those that serve
_REST_S = (0.2, 1.5)  # between a recovery and the next fault
_TOGETHER = 0.25  # share of faults that come with another before it is over
_CANARY_EVERY_S = 0.1


@dataclass(slots=True)
class InjectedFault:
    """One fault; times on `time.perf_counter`."""

    kind: str
    at_s: float
    held_s: float = 0.0
    recovered_s: float | None = None  # a new request was answered, exactly; every engine is there
    skipped: str | None = None


@dataclass(slots=True)
class ChaosRecord:
    """Raw record of a run, from which figures are computed."""

    faults: list[InjectedFault] = field(default_factory=list)
    answers: list[ChaosAnswer] = field(default_factory=list)


class ChaosRun:
    """pool: the requests, with their unfailed answers; the first is the canary."""

    def __init__(
        self,
        server: OwnServer,
        session: aiohttp.ClientSession,
        pool: Sequence[ChaosRequest],
        wanted: Sequence[ChaosAnswer],
        *,
        seed: int,
        num_streams: int,
        kinds: Sequence[str],
        qps: float = 0.0,
    ) -> None:
        self._server = server
        self._session = session
        self._pool = pool
        self._wanted = wanted
        self._load_chance = random.Random(seed + 1)
        self._fault_chance = random.Random(seed + 2)
        self._num_streams = num_streams
        self._kinds = list(kinds)
        self._faults = FLEET_FAULTS if server.num_engines else faults.FAULTS
        self._qps = qps
        self._over = asyncio.Event()
        self.seen = ChaosRecord()

    async def run(self, seconds: float, most_faults: int | None = None) -> ChaosRecord:
        """Inject faults for `seconds`, at most `most_faults`; then wait for open streams to end."""
        workers = [asyncio.create_task(self._stream()) for _ in range(self._num_streams)]
        if self._qps:
            workers.append(asyncio.create_task(self._arrivals()))
        try:
            await asyncio.sleep(1.0)
            if self._kinds:
                await self._strike_until(time.perf_counter() + seconds, most_faults)
            else:
                await asyncio.sleep(seconds)
        finally:
            self._over.set()
            await asyncio.gather(*workers)
        return self.seen

    async def warm_up(self) -> None:
        """The whole pool once more, as the load will send it: memory is what it will be."""
        answers = await asyncio.gather(
            *[ask(self._session, self._server.url, request) for request in self._pool]
        )
        for answer in answers:
            verdict = judge(answer, self._wanted[answer.request.number])
            if not verdict.is_exact:
                raise MeasurementError(f"without any fault: {answer.request.kind}: {verdict}")

    # ---- load ---------------------------------------------------------------------------------

    async def _stream(self) -> None:
        while not self._over.is_set():
            request = self._load_chance.choice(self._pool)
            answer = await ask(self._session, self._server.url, request)
            self.seen.answers.append(answer)
            verdict = judge(answer, self._wanted[request.number])
            if answer.is_refused:
                await self._rest(answer.retry_after_s or 1.0)
            elif not verdict.is_exact:
                console.print(f"  [red]{request.kind}[/]: {verdict}", soft_wrap=True)
                await self._rest(1.0)

    async def _arrivals(self) -> None:
        """Open-loop arrivals of short requests."""
        asked = set[asyncio.Task[None]]()
        while not self._over.is_set():
            asked.add(asyncio.create_task(self._short()))
            await self._rest(self._load_chance.expovariate(self._qps))
        await asyncio.gather(*asked)

    async def _short(self) -> None:
        answer = await ask(self._session, self._server.url, self._pool[0])
        self.seen.answers.append(answer)

    async def _rest(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)

    # ---- faults ---------------------------------------------------------------------------------

    async def _strike_until(self, end_s: float, most_faults: int | None) -> None:
        chance = self._fault_chance
        cards: list[str] = []
        together = 0.0 if self._server.num_engines else _TOGETHER
        while time.perf_counter() < end_s:
            if most_faults is not None and len(self.seen.faults) >= most_faults:
                return
            cards = cards or faults.deck(self._kinds, chance, self._faults)
            kinds = [cards.pop()]
            if cards and chance.random() < together:
                kinds.append(cards.pop())
            struck = await asyncio.gather(
                *[self._strike(kind, 0.7 * n) for n, kind in enumerate(kinds)]
            )
            await self._recovered(struck)
            self._say(struck)
            await asyncio.sleep(chance.uniform(*_REST_S))

    async def _strike(self, kind: str, after_s: float) -> InjectedFault:
        await asyncio.sleep(after_s)
        struck = InjectedFault(kind, time.perf_counter())
        self.seen.faults.append(struck)
        try:
            struck.held_s, lift = await asyncio.to_thread(
                faults.strike, self._faults[kind], self._server, self._fault_chance
            )
        except faults.Skipped as why:
            struck.skipped = str(why)
            return struck
        try:
            await asyncio.sleep(struck.held_s)
        finally:
            lift()
        return struck

    async def _recovered(self, struck: Sequence[InjectedFault]) -> None:
        """Until a new request is answered as ever, by a fleet that is whole. Raises
        MeasurementError if that does not come to be."""
        within_s = FLEET_RECOVERS_WITHIN_S if self._server.num_engines else RECOVERS_WITHIN_S
        deadline_s = time.perf_counter() + within_s
        answer = None
        while time.perf_counter() < deadline_s:
            with suppress(TimeoutError):
                async with asyncio.timeout(RECOVERS_WITHIN_S):
                    answer = await ask(self._session, self._server.url, self._pool[0])
                    is_whole = await asyncio.to_thread(self._server.is_whole)
                    if is_whole and judge(answer, self._wanted[0]).is_exact:
                        for fault in struck:
                            fault.recovered_s = time.perf_counter()
                        return
            await asyncio.sleep(_CANARY_EVERY_S)
        names = ", ".join(fault.kind for fault in struck)
        why = None if answer is None else answer.error
        raise MeasurementError(f"no recovery within {within_s:g} s of: {names} ({why})")

    def _say(self, struck: Sequence[InjectedFault]) -> None:
        for fault in struck:
            took = "skipped: " + fault.skipped if fault.skipped else _took(fault)
            console.print(f"  {len(self.seen.faults):3d}  {fault.kind}: {took}", soft_wrap=True)


def _took(fault: InjectedFault) -> str:
    assert fault.recovered_s is not None
    return f"held {fault.held_s:.1f} s, serving again after {fault.recovered_s - fault.at_s:.1f} s"


def new_session() -> Any:
    """Connections without limit; a stream without an event for `SILENT_S` is given up."""
    import aiohttp  # here, because `legato --help` imports no such thing

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_read=SILENT_S, connect=30.0),
    )
