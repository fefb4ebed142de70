"""Two ranks that last: tests of several modules load their models in the same processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.actors.stage.rank_pool import RankPool


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[list[RankPool]]:
    """Those started so far; more than one only where ranks were killed."""
    pools: list[RankPool] = []
    yield pools
    for pool in pools:
        pool.close()


@pytest.fixture
def ranks(rank_pools: list[RankPool]) -> RankPool:
    """Two processes, with whatever model a test before has left there: `make` replaces it."""
    if not (rank_pools and rank_pools[-1].lives):
        rank_pools.append(RankPool(2))
    return rank_pools[-1]
