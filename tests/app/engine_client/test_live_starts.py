"""Engines that do not start: what is tried again, and what is said."""

from __future__ import annotations

import asyncio

import pytest
import ray

from actors.engine.peers import FrontAddress
from app.engine_client.client import EngineUnavailable
from app.engine_client.link import EngineFailed
from app.engine_client.live import LiveEngine
from tests.app.engine_client.paper_scheduler import Cluster, in_place_of_ray, settings, until


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return in_place_of_ray(monkeypatch)


async def test_an_engine_that_does_not_start_says_why(cluster: Cluster) -> None:
    engine = LiveEngine(settings(), "name")
    with pytest.raises(EngineUnavailable, match="still loading"):
        _ = engine.card
    cause = ValueError("no such folder")
    cluster.start_errors = [ray.exceptions.RayTaskError("start", "", cause)]
    with pytest.raises(EngineFailed, match="no such folder"):
        await engine.start()
    assert len(cluster.schedulers) == 1
    assert not engine.is_ready()


@pytest.mark.parametrize("num_deaths", [2, 3])
async def test_a_scheduler_that_dies_while_it_starts_is_started_again(
    cluster: Cluster, num_deaths: int
) -> None:
    engine = LiveEngine(settings(), "name")
    cluster.start_errors = [ray.exceptions.ActorDiedError() for _ in range(num_deaths)]
    if num_deaths == 3:
        with pytest.raises(EngineFailed, match="died while starting"):
            await engine.start()
    else:
        await engine.start()
        assert engine.is_ready()
    assert len(cluster.schedulers) == 3
    await engine.close()


class NoCluster:
    """Of a fleet whose GCS is away."""

    def new_front_address(self) -> FrontAddress:
        return FrontAddress("e", "@e", None, b"")

    async def join(self, fronts: FrontAddress, tcp_address: str | None) -> None:
        raise ray.exceptions.RpcError("the GCS does not answer")

    async def part(self) -> None:
        """No front was told."""


async def test_a_cluster_that_is_away_costs_no_scheduler(cluster: Cluster) -> None:
    """The replica repeats its entry."""
    engine = LiveEngine(settings(), "name", membership=NoCluster())
    await engine.start()
    cluster.last.die()
    await until(lambda: len(cluster.schedulers) == 2 and engine.is_ready())
    await engine.close()


class Membership:
    """Of a fleet that the engine joins once its scheduler has died."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def new_front_address(self) -> FrontAddress:
        return FrontAddress("e", "@e", None, b"")

    async def join(self, fronts: FrontAddress, tcp_address: str | None) -> None:
        link = self.engine._link
        self._cluster.last.die()
        await until(lambda: not link.is_open)

    async def part(self) -> None:
        """No front was told."""

    engine: LiveEngine


async def test_a_scheduler_that_dies_once_it_has_started_fails_that_start_alone(
    cluster: Cluster,
) -> None:
    membership = Membership(cluster)
    membership.engine = engine = LiveEngine(settings(), "name", membership=membership)
    with pytest.raises(EngineFailed, match="died once it had started"):
        await engine.start()
    await asyncio.sleep(0.01)  # a rebuild would have begun
    assert len(cluster.schedulers) == 1
    assert not engine.is_ready()
    await engine.close()
