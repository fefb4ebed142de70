"""Streams whose KV is copied while they go on: what is there when, and what ends a copy."""

from __future__ import annotations

from collections.abc import Sized

import pytest

from actors.fleet.moves import COPIED_WITHIN_S
from actors.scheduling.events import Submit
from actors.scheduling.request import Request, SamplingParams
from actors.scheduling.state import RequestState
from app.simulate.hardware.interconnect import Interconnect
from app.simulate.run.copies import Copy, StreamCopies
from app.simulate.run.engine import SimulatedEngine
from app.simulate.run.replica import Replica
from tests.app.simulate.run.test_handover import WIRE
from tests.app.simulate.run.test_transfers import Engines, num_there

BEGIN_S = 0.5


class Copying(Engines):
    """A stream of 200 tokens and what has come since, copied from the first engine."""

    def __init__(self, interconnect: Interconnect = WIRE) -> None:
        super().__init__(2, interconnect)
        self.source, self.target = self.all
        self.done: list[tuple[Copy, float]] = []
        self.more: list[tuple[SimulatedEngine, float]] = []
        self.copies = StreamCopies(
            lambda engine: self.alive.get(engine.name) is engine,
            self.touched,
            self.timers.at,
            lambda copy, now_s: self.done.append((copy, now_s)),
            lambda engine, now_s: self.more.append((engine, now_s)),
        )
        request = Request(0, (1,) * 200, SamplingParams(max_tokens=500, min_tokens=500), 0.0)
        self.source.replica.submit(Submit(request), 0.0)
        self.run(BEGIN_S)
        self.state: RequestState = self.source.replica.core.live_requests[0]
        self.num_begun = self.state.num_tokens
        self.copies.begin(self.state, self.source, self.target, BEGIN_S)
        self.copies.look(BEGIN_S)

    def touched(self, replica: Replica, now_s: float) -> None:
        if hasattr(self, "copies"):
            self.copies.look(now_s)

    def steps_until(self, happened: Sized) -> None:
        while not happened:
            assert self.source.replica.next_s < BEGIN_S + COPIED_WITHIN_S
            self.run(self.source.replica.next_s)

    @property
    def num_missing(self) -> int:
        """Of its blocks whose tokens are all computed, those that the target lacks."""
        digests = self.state.block_hashes((self.state.num_tokens - 1) // 16, 16)
        return len(digests) - num_there(self.target, digests)


def test_a_stream_goes_on_until_its_target_lacks_no_full_block() -> None:
    run = Copying()
    assert run.copies.busy == {run.target.name}
    assert run.copies.expected == ((run.target.name, run.num_begun),)
    run.steps_until(run.more)
    # The target may fetch for another stream; this one is still expected there.
    assert run.more[0][0] is run.source
    assert run.copies.busy == set()
    assert run.copies.expected
    assert run.num_missing <= 2
    run.steps_until(run.done)
    ((copy, done_s),) = run.done
    assert copy.is_whole
    assert run.num_missing == 0
    assert run.copies.expected == ()
    assert BEGIN_S < run.more[0][1] < done_s
    assert run.state.num_tokens > run.num_begun + 16
    assert max(run.record.gaps_s) < 0.011, "it pauses at no time: a token every 10 ms"


def test_a_copy_over_a_slow_link_ends_with_what_is_there() -> None:
    run = Copying(Interconnect("slow", 5e7, 0.0))
    run.run(BEGIN_S + COPIED_WITHIN_S - 0.001)
    assert run.done == []
    run.run(BEGIN_S + COPIED_WITHIN_S + 0.001)
    ((copy, done_s),) = run.done
    assert done_s == pytest.approx(BEGIN_S + COPIED_WITHIN_S)
    assert not copy.is_whole
    assert copy.is_fetching


def test_a_copy_whose_target_has_gone_ends_and_is_not_whole() -> None:
    run = Copying()
    del run.alive[run.target.name]
    run.run(BEGIN_S + COPIED_WITHIN_S / 2)
    assert [copy.is_whole for copy, _ in run.done] == [False]
    assert run.copies.open == {}


def test_what_left_an_engine_that_has_gone_is_forgotten() -> None:
    run = Copying()
    del run.alive[run.source.name]
    run.copies.lost(run.target)
    assert run.copies.open
    run.copies.lost(run.source)
    assert run.copies.open == {}
    run.run(BEGIN_S + COPIED_WITHIN_S + 0.1)
    assert run.done == []
