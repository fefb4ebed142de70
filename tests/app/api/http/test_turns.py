"""Requests that arrive together begin one after the other, with tokens in between."""

from __future__ import annotations

import asyncio

import pytest

from app.api.http.turns import Turns


async def test_what_the_loop_receives_comes_between_two_turns() -> None:
    turns, done = Turns(), list[str]()
    here, there = asyncio.get_running_loop(), asyncio.Event()

    async def begin(name: str) -> None:
        await turns.next()
        done.append(name)
        here.call_soon(done.append, f"received during {name}")

    tasks = [asyncio.create_task(begin(name)) for name in "abc"]
    await asyncio.gather(*tasks)
    here.call_soon(there.set)
    await there.wait()
    order = [done.index(f"received during {name}") for name in "abc"]
    assert [name for name in done if len(name) == 1] == ["a", "b", "c"]
    assert order[0] < done.index("c"), "not behind all that had arrived"
    assert order == sorted(order)


async def test_who_gives_up_leaves_the_turn_to_the_next() -> None:
    turns = Turns()
    first, second = (asyncio.create_task(turns.next()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait_for(second, 10)
    with pytest.raises(asyncio.CancelledError):
        await first
    await asyncio.wait_for(turns.next(), 10)  # whoever comes later gets one too
