"""KV fetched between simulated engines: over whose links, from whom, and what is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.scheduling.events import FetchEarly, SaveNow
from actors.scheduling.state import prefix_digests
from app.simulate.hardware.interconnect import Interconnect, Links
from app.simulate.run.engine import SimulatedEngine
from app.simulate.run.record import RunRecord
from app.simulate.run.replica import Replica, build_replica
from app.simulate.run.simulation import Deployment, scheduler_config
from app.simulate.run.timers import Timers
from app.simulate.run.transfers import Transfers
from tests.app.simulate.run.test_handover import FAST, TOKEN_BYTES, WIRE

CONFIG = replace(scheduler_config(FAST, prefix_cache=True), tier_ranks=1, tier_shared=True)
PIECE = 16  # blocks that a core fetches at once, of 16 tokens: 0.256 s on the wire
ONE, TWO = (prefix_digests((start,) * 16 * PIECE, 16) for start in (1, 2))


class Engines:
    """Engines whose KV moves over one interconnect, and their time."""

    def __init__(self, number: int, interconnect: Interconnect = WIRE) -> None:
        self.record, self.timers = RunRecord(4), Timers()
        self.alive: dict[str, SimulatedEngine] = {}
        self.transfers = Transfers(
            Links(interconnect), TOKEN_BYTES, self.alive, self.touched, self.timers.at
        )
        deployment = Deployment(CONFIG, FAST)
        for index in range(number):
            replica = build_replica(deployment, CONFIG, self.record, index, 0, None)
            engine = self.alive[f"engine-{index}"] = SimulatedEngine(replica, 0.0)
            self.transfers.watch(engine)
        self.all = tuple(self.alive.values())

    def touched(self, replica: Replica, now_s: float) -> None:
        """An engine had an event."""

    def run(self, until_s: float) -> None:
        while True:
            replica = min((e.replica for e in self.alive.values()), key=lambda r: r.next_s)
            if min(replica.next_s, self.timers.next_s) > until_s:
                return
            if self.timers.next_s < replica.next_s:
                self.timers.run_next()
            else:
                self.touched(replica, replica.advance())


def give(engine: SimulatedEngine, digests: list[bytes]) -> None:
    """As if this engine had computed these blocks."""
    memory = engine.replica.core.requests.running.block_manager
    blocks = memory.allocate(len(digests))
    for block, digest in zip(blocks, digests, strict=True):
        memory.commit(block, digest)
    memory.free(blocks)


def num_there(engine: SimulatedEngine, digests: list[bytes]) -> int:
    return len(engine.replica.core.requests.running.block_manager.match(digests))


def fetch(engine: SimulatedEngine, digests: list[bytes], now_s: float = 0.0) -> None:
    engine.replica.submit(FetchEarly(tuple(digests)), now_s)


def test_fetches_queue_where_either_end_is_the_same() -> None:
    engines = Engines(4)
    first, second, one, both = engines.all
    give(first, ONE)
    give(second, TWO)
    fetch(one, ONE)
    fetch(both, ONE)  # behind that of `one`, on the link of its source
    fetch(both, TWO)  # behind its own first, on the link of its target
    for until_s, expected in (
        (0.260, (0, 0, 0)),
        (0.262, (16, 0, 0)),
        (0.516, (16, 0, 0)),
        (0.518, (16, 16, 0)),
        (0.772, (16, 16, 0)),
        (0.774, (16, 16, 16)),
    ):
        engines.run(until_s)
        found = num_there(one, ONE), num_there(both, ONE), num_there(both, TWO)
        assert found == expected, until_s
    assert engines.transfers.links.num_bytes == 3 * 16 * PIECE * TOKEN_BYTES
    assert engines.transfers.num_open == 0


def test_who_has_most_of_a_chain_sends_it_and_others_what_follows() -> None:
    engines = Engines(4)
    few, most, rest, target = engines.all
    give(few, ONE[:4])
    give(most, ONE[:10])
    give(rest, ONE[10:14])
    fetch(target, ONE)
    engines.run(1.0)
    assert num_there(target, ONE) == 14
    block_s = 16 * TOKEN_BYTES / WIRE.bytes_per_s
    sent_s = [engines.transfers.links.busy_s[engine.name] for engine in engines.all]
    assert sent_s == pytest.approx([0.0, 10 * block_s, 4 * block_s, 14 * block_s])


def test_what_comes_after_its_source_has_gone_is_lost() -> None:
    engines = Engines(3)
    stays, goes, target = engines.all
    give(stays, ONE[:6])
    give(goes, ONE[6:])
    fetch(target, ONE)
    engines.run(0.1)
    del engines.alive[goes.name]
    engines.run(1.0)
    assert num_there(target, ONE) == 6
    assert not any(map(target.replica.core.tier.is_coming, ONE))  # type: ignore[union-attr]
    assert engines.transfers.num_open == 0


def test_a_fetch_that_exceeds_its_limit_brings_nothing() -> None:
    engines = Engines(2, Interconnect("slow", 1e8, 0.0))  # 2.56 s for what may take 2 s
    source, target = engines.all
    give(source, ONE)
    fetch(target, ONE)
    engines.run(1.9)
    assert engines.transfers.num_open == 1
    engines.run(2.1)
    assert engines.transfers.num_open == 0
    engines.run(3.0)
    assert num_there(target, ONE) == 0


def test_saving_takes_neither_time_nor_a_link() -> None:
    engines = Engines(2)
    source, _ = engines.all
    give(source, ONE)
    source.replica.submit(SaveNow(), 0.0)
    tier = source.replica.core.tier
    assert tier is not None
    assert tier.num_saved_blocks == PIECE
    assert not tier.is_moving
    assert engines.transfers.links.num_bytes == 0.0
