"""An engine's entry among its fleet's: it is kept for `confirm` while the store is away."""

from __future__ import annotations

from typing import cast

import pytest

import app.fleet.registry as module
from actors.engine.peers import FrontAddress
from app.fleet.registry import EngineEntry, Member, Registry


class Store:
    """Keeps ids; while `is_away` it raises."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        self.is_away = False

    async def ids(self) -> list[str]:
        await self._ask()
        return [*self.kept]

    async def put(self, entry: EngineEntry) -> None:
        await self._ask()
        self.kept.append(entry.engine_id)

    async def drop(self, engine_id: str) -> None:
        await self._ask()
        self.kept.remove(engine_id)

    async def _ask(self) -> None:
        if self.is_away:
            raise ConnectionError


async def test_an_engine_that_joins_while_the_store_is_away_is_there_once_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "this_node", lambda: "node")
    store = Store()
    member = Member(cast(Registry, store), "replica")
    for engine_id, is_away in (("first", False), ("second", True)):
        store.is_away = is_away
        joins = member.join(FrontAddress(engine_id, "@e", None, b""), None)
        if is_away:
            with pytest.raises(ConnectionError):
                await joins
        else:
            await joins
    assert store.kept == ["first"]
    store.is_away = False
    await member.confirm()
    assert store.kept == ["first", "second"]
    await member.part()
    assert store.kept == ["first"]  # fronts cannot reach it, and drop it
