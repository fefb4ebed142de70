"""The standby's life: made when idle, told, taken, lost. Actors are fakes: no process starts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import ray

import app.engine_client.standby as module
from actors.engine.config import EngineConfig
from actors.scheduling.config import SchedulerConfig
from actors.stage.spec import StageSpec
from app.engine_client.client import EngineUnavailable
from app.engine_client.standby import Standby

IDLE = {"num_waiting": 0, "num_decoding": 0, "num_prefilling": 0, "num_in_flight": 0}


class Call:
    """`actor.method`, whose `remote()` waits for what the test says."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self._answer = answer

    def remote(self, *arguments: Any, **_: Any) -> Any:
        return self._answer()


class Actor:
    def __init__(self) -> None:
        self.is_killed = False
        self.has_loaded = False
        self.dead = asyncio.Event()
        self.warm_up = Call(self._done)
        self.watch = Call(self._watched)
        self.is_unused = Call(self._unused)

    async def _done(self) -> None:
        pass

    async def _watched(self) -> None:
        await self.dead.wait()
        raise ray.exceptions.RayActorError

    async def _unused(self) -> bool:
        return not self.has_loaded


class Replica:
    """The scheduler that a standby tells, and the processes that it makes."""

    def __init__(self) -> None:
        self.made: list[Actor] = []
        self.names: list[str | None] = []
        self.busy: dict[str, int] = {}
        self.is_open = True

    def create(self, config: Any, group: Any, *, standby: str) -> list[list[Actor]]:
        self.made.append(Actor())
        return [[self.made[-1]]]

    async def ask(self, question: str, *arguments: Any) -> Any:
        if not self.is_open:
            raise EngineUnavailable("it is being rebuilt")
        if question == "status":
            return {**IDLE, "rebuilding": False, **self.busy}
        assert question == "stand_by"
        self.names += arguments
        return None


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while True:
            if condition():
                return
            await asyncio.sleep(0)


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Replica:
    found = Replica()
    monkeypatch.setattr(module, "create_stages", found.create)
    monkeypatch.setattr(module, "current_group", lambda: None)
    for name in ("_IDLE_FOR_S", "_TELL_AGAIN_S", "_LOST_AGAIN_S"):
        monkeypatch.setattr(module, name, 1e-6)
    monkeypatch.setattr(ray, "kill", lambda actor: setattr(actor, "is_killed", True))
    return found


@pytest.fixture
async def standby(replica: Replica) -> AsyncIterator[Standby]:
    config = EngineConfig(StageSpec("none"), SchedulerConfig(num_blocks=8), standby=True)
    found = Standby(config, replica.ask)
    found.keep()
    yield found
    found.close()


async def test_the_scheduler_is_told_and_what_it_takes_is_replaced(
    replica: Replica, standby: Standby
) -> None:
    await until(lambda: replica.names)
    (name,) = replica.names
    assert standby.taken("another") == []
    assert standby.taken(name or "") == [[replica.made[0]]]
    assert standby.taken(name or "") == []
    await until(lambda: len(replica.names) == 2)
    assert not replica.made[0].is_killed
    assert replica.names[1] not in (None, name)


async def test_a_new_scheduler_takes_it(replica: Replica, standby: Standby) -> None:
    await until(lambda: replica.names)
    assert await standby.take() == [[replica.made[0]]]
    await until(lambda: len(replica.made) == 2)


async def test_one_that_a_lost_scheduler_has_used_is_not_taken(
    replica: Replica, standby: Standby
) -> None:
    """The scheduler died before it could tell."""
    await until(lambda: replica.names)
    replica.made[0].has_loaded = True
    assert await standby.take() == []
    assert replica.made[0].is_killed


async def test_a_scheduler_that_is_being_rebuilt_is_told_later(
    replica: Replica, standby: Standby, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AT_MOST_LATE_S", 0.0)  # one that answers nothing is not idle
    replica.is_open = False
    await until(lambda: replica.made)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not replica.names
    replica.is_open = True
    await until(lambda: replica.names)
    assert len(replica.made) == 1


async def test_one_that_dies_is_replaced_and_the_scheduler_told(
    replica: Replica, standby: Standby
) -> None:
    await until(lambda: replica.names)
    replica.made[0].dead.set()
    await until(lambda: len(replica.names) == 3)
    assert replica.names[1] is None
    assert replica.made[0].is_killed


async def test_one_that_dies_soon_again_is_replaced_later(
    replica: Replica, standby: Standby, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOST_AGAIN_S", 1e6)
    await until(lambda: replica.names)
    for num_names in (3, 4):  # no more than that it is lost
        replica.made[-1].dead.set()
        await until(lambda: len(replica.names) == num_names)  # noqa: B023
    for _ in range(50):
        await asyncio.sleep(0)
    assert (len(replica.made), replica.names[-1]) == (2, None)


async def test_none_is_made_beside_running_requests(
    replica: Replica, standby: Standby, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until(lambda: replica.names)
    replica.busy = {"num_decoding": 1}
    (name,) = replica.names
    standby.taken(name or "")
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(replica.made) == 1
    replica.busy = {}
    await until(lambda: len(replica.made) == 2)


async def test_a_new_replica_makes_one_before_requests_come(
    replica: Replica, standby: Standby, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_IDLE_FOR_S", 1e6)
    await until(lambda: replica.names)


async def test_its_end_ends_its_processes(replica: Replica, standby: Standby) -> None:
    await until(lambda: replica.names)
    standby.close()
    assert replica.made[0].is_killed
