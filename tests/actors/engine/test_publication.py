"""What fronts are told: soon after anything happens, now and then if nothing does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import actors.engine.publication as module
from actors.engine.peers import FrontAddress, Peers
from actors.engine.publication import Publication
from actors.fleet.publish import Publisher
from actors.fleet.snapshot import EngineSnapshot, EngineState, PrefixUpdate, short_digests
from actors.scheduling.build import build_core
from actors.scheduling.events import Execute, StepDone, Submit
from actors.scheduling.state import prefix_digests
from actors.transport.addresses import new_local_address, new_secret
from actors.transport.messages import Hello, Welcome, pack_kind, unpack_kind
from actors.transport.wire import connect
from tests.actors.fleet.pictures import BITS
from tests.actors.scheduling.fake_stages import FakeStages
from tests.actors.scheduling.short_lives import config, request


class Front:
    """told: what the engine sends by itself."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self._arrived = asyncio.Event()

    async def connect(self, fronts: FrontAddress) -> None:
        socket = await connect(fronts.local, self._received, lambda: None, fronts.secret)
        socket.send(pack_kind(Hello(time.monotonic())))

    def _received(self, frame: bytes) -> None:
        message = unpack_kind(frame)
        if not isinstance(message, Welcome):
            self.told.append(message)
            self._arrived.set()

    @property
    def sequence(self) -> int:
        """Of the last snapshot."""
        return max(m.sequence for m in self.told if isinstance(m, EngineSnapshot))

    async def hears(self, what: Callable[[Any], bool]) -> Any:
        async with asyncio.timeout(10):
            while True:
                for message in self.told:
                    if what(message):
                        return message
                self._arrived.clear()
                await self._arrived.wait()

    async def hears_snapshot(self, **fields: Any) -> EngineSnapshot:
        def fits(message: Any) -> bool:
            values = fields.items()
            return isinstance(message, EngineSnapshot) and all(
                getattr(message, name) == value for name, value in values
            )

        found: EngineSnapshot = await self.hears(fits)
        return found


class Engine:
    """A core without a loop, and the publication of its state."""

    def __init__(self) -> None:
        settings = config(prefix_cache=True)
        self.core = build_core(settings)
        self.stages = FakeStages(settings)
        self.peers = Peers(lambda number, message: None, lambda number: None)
        self.publication = Publication(self.core, Publisher("e", BITS, self.core), self.peers)
        self.fronts = FrontAddress("e", new_local_address(), None, new_secret())

    async def open(self) -> None:
        def welcome(number: int) -> Welcome:
            asyncio.get_running_loop().call_soon(self.publication.publish, number)
            return Welcome(number, time.monotonic(), 11, (0,), 40)

        await self.peers.listen(self.fronts, welcome)

    def serve(self, number: int) -> None:
        """A request of two blocks of prompt, from its arrival to its end."""
        out = self.core.handle(Submit(request(number, prompt=9, output=1)), float(number))
        (plan,) = [i.plan for i in out if isinstance(i, Execute)]
        self.core.handle(StepDone(self.stages.run(plan)), float(number))
        assert self.core.is_idle


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    made = Engine()
    await made.open()
    yield made
    made.peers.close_fronts()


def digests(number: int) -> set[bytes]:
    return {*short_digests(prefix_digests(request(number, prompt=9).prompt, 4))}


async def test_a_new_front_is_told_everything_and_then_what_changes(engine: Engine) -> None:
    first, second = Front(), Front()
    await first.connect(engine.fronts)
    whole = await first.hears(lambda message: isinstance(message, PrefixUpdate))
    assert (whole.added, whole.whole) == ((), True)
    engine.publication.publish()  # the engine begins to note changes
    engine.serve(1)
    engine.publication.publish()
    update = await first.hears(lambda message: isinstance(message, PrefixUpdate) and message.added)
    assert ({*update.added}, update.whole) == (digests(1), False)
    await second.connect(engine.fronts)
    whole = await second.hears(lambda message: isinstance(message, PrefixUpdate))
    assert ({*whole.added}, whole.whole) == (digests(1), True)
    num_updates = sum(isinstance(message, PrefixUpdate) for message in first.told)
    engine.publication.publish()  # nothing has changed
    await first.hears_snapshot(sequence=5)
    assert sum(isinstance(message, PrefixUpdate) for message in first.told) == num_updates


async def test_work_is_told_soon_and_rest_now_and_then(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUSY_PERIOD_S", 0.002)
    monkeypatch.setattr(module, "IDLE_PERIOD_S", 1e9)
    front = Front()
    await front.connect(engine.fronts)
    engine.publication.start()
    await front.hears_snapshot(sequence=2)
    await asyncio.sleep(0.01)
    assert front.sequence == 2  # nothing has happened since
    engine.serve(1)
    await front.hears_snapshot(sequence=3, num_prefilled_tokens=9)
    await asyncio.sleep(0.01)
    monkeypatch.setattr(module, "IDLE_PERIOD_S", 0.0)  # a silent engine counts as dead
    await front.hears_snapshot(sequence=5)


async def test_what_the_engine_becomes_is_told_at_once(engine: Engine) -> None:
    front, publication = Front(), engine.publication
    await front.connect(engine.fronts)
    await front.hears_snapshot(sequence=1, state=EngineState.SERVING)
    publication.computes(False)
    await front.hears_snapshot(sequence=2, state=EngineState.STARTING)
    publication.computes(True)
    await front.hears_snapshot(sequence=3, state=EngineState.SERVING)
    publication.leave()
    await front.hears_snapshot(sequence=4, state=EngineState.DRAINING)
    publication.computes(False)
    publication.computes(True)  # rebuilt while it leaves
    await front.hears_snapshot(sequence=6)
    assert {m.state for m in front.told if isinstance(m, EngineSnapshot) and m.sequence > 3} == {
        EngineState.DRAINING
    }
