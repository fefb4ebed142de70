"""Where a stream is once a copy of its KV has ended, in full or early."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from actors.scheduling.request import Request, SamplingParams
from app.engine_client.client import EngineUnavailable
from app.engine_client.streams import Stream
from app.fleet.connection import FleetRequest
from app.fleet.stream_copies import StreamCopies
from tests.actors.fleet.pictures import snapshot


class Engine:
    """A connection that answers every question, unless `fails` names it."""

    is_open = True
    leaving_since_s: float | None = None

    def __init__(self, name: str, shares_kv: bool = True) -> None:
        self.engine_id = name
        self.snapshot = snapshot(name, shares_kv=shares_kv)
        self.open_requests: dict[int, Any] = {}
        self.asked: list[str] = []
        self.fails = ""
        self.num_held = 3

    @property
    def was_leaving(self) -> bool:
        return self.leaving_since_s is not None

    async def ask(self, question: str, *arguments: Any) -> int:
        self.asked.append(question)
        await asyncio.sleep(0)
        if question == self.fails:
            raise EngineUnavailable("gone")
        return self.num_held

    def fetch_early(self, digests: Sequence[bytes], is_last: bool = False) -> None:
        self.asked.append("fetch last" if is_last else "fetch")

    def computes(self, fleet_request: FleetRequest) -> bool:
        return fleet_request in self.open_requests.values()


class Fleet:
    """One stream at `here`, which is to go `there`, and what became of it."""

    def __init__(self, shares_kv: bool = True) -> None:
        self.here, self.there = Engine("here", shares_kv), Engine("there", shares_kv)
        request = Request(1, (5, 6), SamplingParams(9), 0.0)
        self.stream = FleetRequest(request, 0, Stream(), delivered=[7])
        self.here.open_requests[1] = self.stream
        self.moved: list[tuple[str, str]] = []
        self.ended: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.copies = StreamCopies(
            self, {"here": self.here, "there": self.there}, {},  # type: ignore[arg-type, dict-item]
            lambda work: self.tasks.append(asyncio.create_task(work)),
            self._move, lambda connection: self.ended.append(connection.engine_id),
        )  # fmt: skip

    def relieved(self, streams: Sequence[FleetRequest], *situation: Any) -> Any:
        return [(stream, "there") for stream in streams]

    def digests(self, stream: FleetRequest, block_size: int) -> list[bytes]:
        return [b"x", b"y", b"z"]

    def _move(self, stream: FleetRequest, connection: Any) -> None:
        self.moved.append((connection.engine_id, stream.receiver_id))
        self.here.open_requests.clear()

    async def relieve(self) -> None:
        self.copies.begin_relief([self.stream], self.here)  # type: ignore[arg-type]
        assert (self.stream in self.copies) == self.here.snapshot.shares_kv
        await asyncio.gather(*self.tasks)
        assert self.stream not in self.copies


async def test_a_stream_goes_once_all_is_there() -> None:
    fleet = Fleet()
    await fleet.relieve()
    assert fleet.moved == [("here", "there")]
    assert fleet.here.asked == ["kv_saved", "kv_saved", "next_token"]
    assert fleet.there.asked == ["fetch", "kv_fetched", "fetch last", "kv_fetched"]
    assert fleet.ended == ["here"] * 2, "once when another may be fetched, and at the end"


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("fails", ["kv_fetched", ""])
async def test_without_a_copy_it_leaves_only_an_engine_that_drains(
    leaves: bool, fails: str
) -> None:
    """Its blocks do not arrive, or most of them were given up."""
    fleet = Fleet()
    fleet.there.fails, fleet.there.num_held = fails, 1
    fleet.here.leaving_since_s = 0.0 if leaves else None
    await fleet.relieve()
    assert fleet.moved == ([("here", "there")] if leaves else [])
    assert leaves or fleet.stream.receiver_id == ""
    assert fleet.ended[-1] == "here"


async def test_its_last_blocks_may_be_computed_anew() -> None:
    fleet = Fleet()
    fleet.here.fails = "next_token"
    await fleet.relieve()
    assert fleet.moved == [("here", "there")]


async def test_a_stream_that_ends_meanwhile_goes_nowhere() -> None:
    fleet = Fleet()
    fleet.copies.begin_relief([fleet.stream], fleet.here)  # type: ignore[arg-type]
    fleet.here.open_requests.clear()
    await asyncio.gather(*fleet.tasks)
    assert fleet.moved == []
    assert fleet.there.asked == []


async def test_without_shared_kv_it_goes_at_once() -> None:
    fleet = Fleet(shares_kv=False)
    await fleet.relieve()
    assert fleet.moved == [("here", "there")]
    assert fleet.here.asked == fleet.there.asked == fleet.tasks == []
    assert fleet.stream.receiver_id == ""
